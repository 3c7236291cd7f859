# cmake -D MPIEXEC=… -D NUMPROC_FLAG=… -D PROGRAM=… -D VERDICTS=DIRECTORY -P mpi_faults.cmake: each
# fault among three processes, of which those that live must say so.
cmake_minimum_required(VERSION 3.21)
set(errors "")
set(ENV{PMIX_MCA_plog} "^default")  # or Open MPI 4.1's mpiexec may crash on words about a dead peer
# Those after which all live share a start.
set(survived uninitialised throw operation size counts abort drop parameters options duplicate part)
# Over connections, which break, and in two parts whatever is larger than a header.
set(notice_kill_flags --mca btl tcp,self --mca btl_tcp_if_include lo
  --mca btl_tcp_eager_limit 256 --mca btl_tcp_rndv_eager_limit 256)
foreach(fault survived abort_multiple finalized kill kill_large stop stop_large split notice_kill absent unmade)
  set(faults ${fault})
  if(fault STREQUAL "survived")
    set(faults ${survived})
  endif()
  file(REMOVE_RECURSE ${VERDICTS})
  file(MAKE_DIRECTORY ${VERDICTS})
  execute_process(
    COMMAND ${MPIEXEC} --enable-recovery ${${fault}_flags} ${NUMPROC_FLAG} 3 ${PROGRAM} ${faults}
    WORKING_DIRECTORY ${VERDICTS} TIMEOUT 60 OUTPUT_VARIABLE output ERROR_VARIABLE output)
  foreach(rank 0 1 2)
    if(fault MATCHES "kill|split" AND rank EQUAL 1)
      continue()
    endif()
    set(verdict "none")
    if(EXISTS ${VERDICTS}/rank.${rank})
      file(STRINGS ${VERDICTS}/rank.${rank} verdict)
    endif()
    if(NOT verdict STREQUAL "ok")
      string(APPEND errors "${fault}, rank ${rank}: ${verdict}\n${output}\n")
    endif()
  endforeach()
endforeach()
if(errors)
  message(FATAL_ERROR "${errors}")
endif()
