# cmake -D MPIEXEC=… -D NUMPROC_FLAG=… -D PROGRAM=… -P mpi_faults.cmake: each fault among three
# processes, of which those that live must say so.
cmake_minimum_required(VERSION 3.21)
set(errors "")
foreach(fault kill kill_large stop stop_large throw operation size counts abort abort_multiple drop absent unmade finalized)
  execute_process(
    COMMAND ${MPIEXEC} --enable-recovery ${NUMPROC_FLAG} 3 ${PROGRAM} ${fault}
    TIMEOUT 20 OUTPUT_VARIABLE output ERROR_VARIABLE output)
  foreach(rank 0 1 2)
    if(fault MATCHES "kill" AND rank EQUAL 1)
      continue()
    endif()
    if(NOT output MATCHES "rank ${rank}: ok\n")
      string(APPEND errors "${fault}, rank ${rank}:\n${output}\n")
      break()
    endif()
  endforeach()
endforeach()
if(errors)
  message(FATAL_ERROR "${errors}")
endif()
