# cmake -D BERT=… -D MPIEXEC=… -D NUMPROC_FLAG=… -D WORK_DIR=… -D TEXT=… -P mpi.cmake: the program bert
# with ranks that are processes.
cmake_minimum_required(VERSION 3.21)
file(MAKE_DIRECTORY ${WORK_DIR})
set(small --model tiny --text ${TEXT} --batch 2 --seq 16 --steps 3 --clip 0.5)

# Leaves what it printed in `out`.
function(run expected_code expected_text)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE out ERROR_VARIABLE out
                  WORKING_DIRECTORY ${WORK_DIR} TIMEOUT 60)
  if(NOT code EQUAL expected_code OR NOT out MATCHES "${expected_text}")
    message(FATAL_ERROR "${ARGN}\nended with ${code} instead of ${expected_code}, or did not say "
                        "\"${expected_text}\":\n${out}")
  endif()
  set(out "${out}" PARENT_SCOPE)
endfunction()

function(expect_same what a b)
  if(NOT a STREQUAL b)
    message(FATAL_ERROR "${what} differ:\n${a}\n${b}")
  endif()
endfunction()

# Processes train as threads do, bit for bit, and each keeps what was estimated. LAMB cuts no tensor, so
# that its ranks own more and less.
foreach(optimizer adam lamb)
  set(arguments ${BERT} ${small} --optimizer ${optimizer})
  set(ranks 2)
  if(optimizer STREQUAL "lamb")
    set(ranks 3)
  endif()
  run(0 "the same, bit for bit" ${arguments} --ranks ${ranks} --json threads.json)
  run(0 "the same, bit for bit" ${MPIEXEC} ${NUMPROC_FLAG} ${ranks} ${arguments} --communicator mpi
      --json processes.json --trace trace.json)
  file(READ ${WORK_DIR}/threads.json threads)
  file(READ ${WORK_DIR}/processes.json processes)
  file(READ ${WORK_DIR}/trace.json trace)
  foreach(mode 0 1)
    foreach(result losses norms hash)
      string(JSON a GET "${threads}" modes ${mode} ${result})
      string(JSON b GET "${processes}" modes ${mode} ${result})
      expect_same(${result} "${a}" "${b}")
    endforeach()
    string(JSON memory GET "${processes}" modes ${mode} memory)
    string(JSON estimated GET "${processes}" modes ${mode} estimated)
    expect_same("what is kept and what was estimated" "${memory}" "${estimated}")
    # A row a process.
    set(rows "  rank      process[^\n]*\n")
    set(seen "")
    math(EXPR last "${ranks} - 1")
    foreach(rank RANGE ${last})
      string(JSON process GET "${processes}" modes ${mode} resident_by_rank ${rank} process)
      if(process IN_LIST seen)
        message(FATAL_ERROR "two ranks are process ${process}")
      endif()
      list(APPEND seen ${process})
      string(APPEND rows " +${rank} +${process} [^\n]*\n")
      if(NOT trace MATCHES "\"name\":\"rank ${rank}\"" OR
         NOT trace MATCHES "\"name\":\"backward\",\"ph\":\"X\",\"pid\":${mode},\"tid\":${rank},")
        message(FATAL_ERROR "the trace lacks rank ${rank}")
      endif()
    endforeach()
    # What mpirun adds where it writes to a terminal.
    string(REPLACE "\r" "" out "${out}")
    if(NOT out MATCHES "${rows}")
      message(FATAL_ERROR "there is no table like\n${rows}in\n${out}")
    endif()
  endforeach()
endforeach()

# Stages whose traffic has threads of its own.
run(0 "the same, bit for bit" ${BERT} ${small} --ranks 2 --stage all --json threads.json)
run(0 "the same, bit for bit" ${MPIEXEC} ${NUMPROC_FLAG} 2 ${BERT} ${small} --communicator mpi --stage all
    --json processes.json --trace trace.json)
file(READ ${WORK_DIR}/threads.json threads)
file(READ ${WORK_DIR}/processes.json processes)
file(READ ${WORK_DIR}/trace.json trace)
foreach(mode 2 3)
  foreach(result losses norms hash)
    string(JSON a GET "${threads}" modes ${mode} ${result})
    string(JSON b GET "${processes}" modes ${mode} ${result})
    expect_same("${result} of stage ${mode}" "${a}" "${b}")
  endforeach()
endforeach()
if(NOT trace MATCHES "\"traffic of rank 1\"")
  message(FATAL_ERROR "the trace has no traffic of rank 1")
endif()

# Saved by processes and gone on by threads, and the other way round: as if nobody had stopped.
function(hash_of_run var)
  string(REGEX MATCH "hash of the parameters [0-9a-f]+" hash "${out}")
  set(${var} "${hash}" PARENT_SCOPE)
endfunction()
set(threads ${BERT} ${small} --mode sharded)
set(processes ${MPIEXEC} ${NUMPROC_FLAG} 2 ${threads} --communicator mpi)
run(0 "hash" ${threads})
hash_of_run(whole)
run(0 "hash" ${processes} --stage 2 --until 2 --save saved)
run(0 "hash" ${threads} --stage 3 --resume saved)
hash_of_run(resumed)
expect_same("a run and one that threads resumed" "${whole}" "${resumed}")
run(0 "hash" ${threads} --until 1 --save saved)
run(0 "hash" ${processes} --stage 3 --resume saved)
hash_of_run(resumed)
expect_same("a run and one that processes resumed" "${whole}" "${resumed}")

# What a process has grown by is what was estimated of its rank, where the system tells.
run(0 "rank      process" ${MPIEXEC} ${NUMPROC_FLAG} 2 ${BERT} --model mini --synthetic --batch 1
    --seq 16 --steps 1 --mode sharded --communicator mpi --json mini.json)
file(READ ${WORK_DIR}/mini.json mini)
foreach(rank 0 1)
  string(JSON before GET "${mini}" modes 0 resident_by_rank ${rank} before)
  string(JSON built GET "${mini}" modes 0 resident_by_rank ${rank} built)
  if(NOT before STREQUAL "" AND NOT built STREQUAL "")
    set(estimated 0)
    foreach(part parameters gradients state buckets)
      string(JSON bytes GET "${mini}" modes 0 estimated ${rank} ${part})
      math(EXPR estimated "${estimated} + ${bytes}")
    endforeach()
    math(EXPR percent "100 * (${built} - ${before}) / ${estimated}")
    if(percent LESS 90 OR percent GREATER 110)
      message(FATAL_ERROR "rank ${rank} grew from ${before} to ${built}, ${percent} % of ${estimated}")
    endif()
  endif()
endforeach()

# What one process refuses all do, and it is said once.
function(refuse text)
  run(2 "${text}" ${MPIEXEC} ${NUMPROC_FLAG} 2 ${BERT} ${small} ${ARGN})
  string(REGEX MATCHALL "bert: " said "${out}")
  expect_same("messages" "${said}" "bert: ")
endfunction()
refuse("mpirun started 2 processes, each of which would train on its own: add --communicator mpi")
refuse("--ranks 3: over MPI each process is a rank, and there are 2" --communicator mpi --ranks 3)
refuse("not compiled for --optimizer adam --communicator mpi; there are.*bf16" --communicator mpi
       --bucket-view none)

run(2 "rank 1 was started with other arguments than rank 0" ${MPIEXEC}
    ${NUMPROC_FLAG} 1 ${BERT} ${small} --communicator mpi :
    ${NUMPROC_FLAG} 1 ${BERT} ${small} --communicator mpi --dropout 0.5)
