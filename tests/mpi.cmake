# Tests that are several processes. As settings in the environment, so that an MPI other than Open MPI
# starts them too: as root, more processes than processors, and no complaint about missing networks.
set(zero_mpi_environment
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
  OMPI_MCA_btl_base_warn_component_unused=0)

add_executable(mpi_test conformance/mpi_test.cpp comm/mpi_sharded_test.cpp)
target_link_libraries(mpi_test PRIVATE zero::mpi zero_catch_main zero_warnings zero_exact_arithmetic)
target_compile_options(mpi_test PRIVATE -O0)
zero_label(mpi mpi_test)
foreach(ranks RANGE 1 4)
  add_test(NAME mpi_test_${ranks}
    COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} ${MPIEXEC_PREFLAGS}
            $<TARGET_FILE:mpi_test> ${MPIEXEC_POSTFLAGS})
  # They all watch for messages: two at a time would share processors.
  set_tests_properties(mpi_test_${ranks} PROPERTIES LABELS mpi TIMEOUT 120 PROCESSORS 2
    ENVIRONMENT "${zero_mpi_environment}")
endforeach()
