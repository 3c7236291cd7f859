# cmake -D PROGRAM=… -D MODEL=conv|transformer -D DIGITS=… -D TEXT=… [-D MPIEXEC=… -D NUMPROC_FLAG=…]
# -P train.cmake: the program libtorch_train, with ranks that are threads or, given MPIEXEC, processes.
cmake_minimum_required(VERSION 3.21)

# Leaves what it printed in `out`.
function(run expected_code expected_text)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE out ERROR_VARIABLE out TIMEOUT 120)
  if(NOT code MATCHES "^${expected_code}$" OR NOT out MATCHES "${expected_text}")
    message(FATAL_ERROR "${ARGN}\nended with ${code} instead of ${expected_code}, or did not say "
                        "\"${expected_text}\":\n${out}")
  endif()
  set(out "${out}" PARENT_SCOPE)
endfunction()

# Finds what a run came to.
function(hash_of_run var)
  string(REGEX MATCH "hash of losses and parameters: [0-9a-f]+" hash "${out}")
  set(${var} "${hash}" PARENT_SCOPE)
endfunction()

function(expect_same what a b)
  if(NOT a STREQUAL b)
    message(FATAL_ERROR "${what} differ:\n${a}\n${b}")
  endif()
endfunction()

if(MODEL STREQUAL "conv" AND NOT EXISTS ${DIGITS})
  message("SKIPPED: there is no ${DIGITS}, which ./dev test takes from scikit-learn's package")
  return()
endif()
set(program ${PROGRAM} --model ${MODEL} --digits ${DIGITS} --text ${TEXT})
if(MODEL STREQUAL "transformer")
  list(APPEND program --width 32 --layers 1 --context 16)
endif()
set(train ${program} --steps 4)
set(same "the same, bit for bit")

run(0 "${same}" ${train})
hash_of_run(threads)
if(MPIEXEC)
  # Processes come to what threads do.
  foreach(stage 1 2)
    run(0 "${same}" ${MPIEXEC} ${NUMPROC_FLAG} 2 ${train} --stage ${stage})
    hash_of_run(processes)
    expect_same("threads and processes at stage ${stage}" "${threads}" "${processes}")
  endforeach()
  foreach(rank 0 1)
    if(NOT out MATCHES " ${rank}  growth of the process ")
      message(FATAL_ERROR "nothing is said of the growth of rank ${rank}:\n${out}")
    endif()
  endforeach()
  run(2 "mpirun started 2 processes" ${MPIEXEC} ${NUMPROC_FLAG} 2 ${train} --ranks 3)
  return()
endif()

# Each of two ranks keeps half of the state, but for padding.
if(NOT out MATCHES "0  optimizer state +([0-9]+) +([0-9]+) +0\\.50\n")
  message(FATAL_ERROR "the state is not halved:\n${out}")
endif()
# Nor does it matter what is sharded, but for memory: backward's gradients are gone at stage 2.
run(0 "gradients, as torch made them +[1-9][0-9]* +0 " ${train} --stage 2)
hash_of_run(stage_2)
expect_same("stages 1 and 2" "${threads}" "${stage_2}")
# What does matter is seen.
run(0 "hash" ${train} --mode sharded --seed 2)
hash_of_run(other)
if(other STREQUAL threads)
  message(FATAL_ERROR "another seed changes nothing")
endif()

if(MODEL STREQUAL "conv")
  # Enough to see that it learns.
  run(0 "accuracy on unseen data (9[0-9]|100)\\." ${program} --steps 60 --mode sharded)
  run(2 "nowhere.csv" ${PROGRAM} --digits nowhere.csv)
  run(2 "line 1: column 1 is no pixel" ${PROGRAM} --digits ${TEXT})
else()
  run(0 "${same}" ${train} --ranks 3)
  # By torch's own optimizer too.
  run(0 "${same}" ${train} --optimizer torch-adamw)
  hash_of_run(other)
  if(other STREQUAL threads)
    message(FATAL_ERROR "torch's AdamW was not taken: its sums are rounded otherwise")
  endif()
  run(2 "compiled for --stage 1 alone" ${train} --optimizer torch-adamw --stage 2)
  # Its first loss is a guess among all characters, which is 4.4 or so.
  run(0 "loss from [45]\\.[0-9]+ to [0-3]\\." ${program} --steps 40 --mode replicated)
  run(2 "nowhere.txt" ${PROGRAM} --model transformer --text nowhere.txt)
  run(2 "--width 33: give a multiple of 32" ${PROGRAM} --model transformer --width 33)
  run(2 "--context 5000: the tenth of the text" ${PROGRAM} --model transformer --text ${TEXT} --context 5000)
  foreach(wrong "--model;mlp" "--mode;both" "--ranks;0" "--stage;3" "--steps;-1" "--batch;0" "--lr;x" "--frobnicate")
    list(GET wrong 0 option)
    run("10[0-9]" "${option}" ${PROGRAM} ${wrong})
  endforeach()
endif()
