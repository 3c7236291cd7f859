# Tests that are several processes. As settings in the environment, so that an MPI other than Open MPI
# starts them too: as root, more processes than processors, and no complaint about missing networks.
set(zero_mpi_environment
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
  OMPI_MCA_btl_base_warn_component_unused=0)

add_executable(mpi_test
  conformance/mpi_test.cpp comm/mpi_sharded_test.cpp peer_faults/mpi_agreement_test.cpp)
target_link_libraries(mpi_test PRIVATE zero::mpi zero_catch_main zero_warnings zero_exact_arithmetic)
target_compile_options(mpi_test PRIVATE -O0)
zero_label(mpi mpi_test)
if(ZERO_TEST_COVERED)
  set(zero_mpi_worlds 1 2 3 4)
else()
  # Under a sanitizer one that has everything. What MPI itself keeps at its end are no leaks of ours.
  set(zero_mpi_worlds 4)
  list(APPEND zero_mpi_environment ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1)
endif()
foreach(ranks IN LISTS zero_mpi_worlds)
  add_test(NAME mpi_test_${ranks}
    COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} ${MPIEXEC_PREFLAGS}
            $<TARGET_FILE:mpi_test> ${MPIEXEC_POSTFLAGS})
  # They all watch for messages: two at a time would share processors.
  set_tests_properties(mpi_test_${ranks} PROPERTIES LABELS mpi TIMEOUT 120 PROCESSORS 2
    ENVIRONMENT "${zero_mpi_environment}")
endforeach()


# And from several threads at once, where this MPI allows that.
add_test(NAME mpi_threads_test
  COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} 2 ${MPIEXEC_PREFLAGS}
          $<TARGET_FILE:mpi_test> "MPI: conformance" ${MPIEXEC_POSTFLAGS})
set_tests_properties(mpi_threads_test PROPERTIES LABELS mpi TIMEOUT 120 PROCESSORS 2
  ENVIRONMENT "${zero_mpi_environment};ZERO_TEST_MPI_THREADS=1")

# Saved by three processes, loaded by two others.
if(TARGET zero::checkpoint)
  add_executable(mpi_checkpoint_test checkpoint/mpi_checkpoint_test.cpp)
  target_link_libraries(mpi_checkpoint_test PRIVATE
    zero::mpi zero::checkpoint zero_catch_main zero_warnings zero_exact_arithmetic)
  target_compile_options(mpi_checkpoint_test PRIVATE -O0)
  zero_label(mpi mpi_checkpoint_test)
  zero_label(checkpoint mpi_checkpoint_test)
  function(zero_mpi_checkpoint_test verb ranks)
    add_test(NAME mpi_checkpoint_${verb}
      COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} ${MPIEXEC_PREFLAGS}
              $<TARGET_FILE:mpi_checkpoint_test> "[${verb}]" ${MPIEXEC_POSTFLAGS})
    set_tests_properties(mpi_checkpoint_${verb} PROPERTIES LABELS "checkpoint;mpi" TIMEOUT 120 PROCESSORS 2
      ENVIRONMENT "${zero_mpi_environment};ZERO_TEST_CHECKPOINT=${CMAKE_CURRENT_BINARY_DIR}/mpi_checkpoint")
  endfunction()
  zero_mpi_checkpoint_test(save 3)
  zero_mpi_checkpoint_test(load 2)
  set_tests_properties(mpi_checkpoint_save PROPERTIES FIXTURES_SETUP mpi_checkpoint)
  set_tests_properties(mpi_checkpoint_load PROPERTIES FIXTURES_REQUIRED mpi_checkpoint)
endif()

if(NOT ZERO_TEST_COVERED)
  return()
endif()

# What happens when a process dies is mpiexec's doing, and its options are its own.
execute_process(COMMAND ${MPIEXEC_EXECUTABLE} --version OUTPUT_VARIABLE zero_mpiexec ERROR_QUIET)
if(zero_mpiexec MATCHES "Open MPI|OpenRTE")
  add_executable(mpi_faults comm/mpi_faults.cpp)
  target_link_libraries(mpi_faults PRIVATE zero::mpi zero_warnings)
  target_compile_options(mpi_faults PRIVATE -O0)
  zero_label(mpi mpi_faults)
  add_test(NAME mpi_faults_test
    COMMAND ${CMAKE_COMMAND} -D MPIEXEC=${MPIEXEC_EXECUTABLE} -D NUMPROC_FLAG=${MPIEXEC_NUMPROC_FLAG}
            -D PROGRAM=$<TARGET_FILE:mpi_faults> -D VERDICTS=${CMAKE_CURRENT_BINARY_DIR}/mpi_verdicts
            -P ${CMAKE_CURRENT_LIST_DIR}/comm/mpi_faults.cmake)
  set_tests_properties(mpi_faults_test PROPERTIES LABELS mpi TIMEOUT 300  # sleeps, mostly
    ENVIRONMENT "${zero_mpi_environment}")

  # Across two hosts, over TCP: the sums and bits of one, and two ways to lose a peer there.
  function(zero_two_hosts_test name)
    add_test(NAME two_hosts_${name} COMMAND ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/hosts/two_hosts.sh ${ARGN})
    set_tests_properties(two_hosts_${name} PROPERTIES LABELS mpi TIMEOUT 120 PROCESSORS 2
      SKIP_RETURN_CODE 77 ENVIRONMENT "${zero_mpi_environment}")
  endfunction()
  zero_two_hosts_test(bits --least 8000000 ${MPIEXEC_EXECUTABLE} $<TARGET_FILE:mpi_test>
    "MPI: conformance,MPI: the bits of in-process ranks")
  zero_two_hosts_test(kill --slots 1,2 --verdicts 0,2 ${MPIEXEC_EXECUTABLE}
    $<TARGET_FILE:mpi_faults> kill)
  zero_two_hosts_test(link --slots 1,2 --verdicts 0,1,2 --cut ${MPIEXEC_EXECUTABLE}
    $<TARGET_FILE:mpi_faults> link)
endif()

# Of the examples. The mean of what the two ranks see is 3; each sees 2 or 4.
if(TARGET mpi_example)
  add_test(NAME example.mpi
    COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} 2 ${MPIEXEC_PREFLAGS}
            $<TARGET_FILE:mpi_example> ${MPIEXEC_POSTFLAGS})
  set_tests_properties(example.mpi PROPERTIES LABELS "examples;mpi" TIMEOUT 120 PROCESSORS 2
    ENVIRONMENT "${zero_mpi_environment}"
    PASS_REGULAR_EXPRESSION "the same weights on all ranks: 3\\.00")
  zero_label(mpi mpi_example)
endif()
if(TARGET bert AND "adam" IN_LIST ZERO_BERT_OPTIMIZERS AND "lamb" IN_LIST ZERO_BERT_OPTIMIZERS)
  add_test(NAME bert_mpi
    COMMAND ${CMAKE_COMMAND} -D BERT=$<TARGET_FILE:bert> -D MPIEXEC=${MPIEXEC_EXECUTABLE}
            -D NUMPROC_FLAG=${MPIEXEC_NUMPROC_FLAG} -D WORK_DIR=${CMAKE_CURRENT_BINARY_DIR}/bert_mpi
            -D TEXT=${PROJECT_SOURCE_DIR}/LICENSE -P ${CMAKE_CURRENT_LIST_DIR}/bert/mpi.cmake)
  set_tests_properties(bert_mpi PROPERTIES LABELS "bert;mpi" TIMEOUT 120 PROCESSORS 2
    ENVIRONMENT "${zero_mpi_environment}")
  zero_label(mpi bert)
endif()
