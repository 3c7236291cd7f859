# Users' ways to zero, each tried from scratch in a folder of its own.
set(ways package subdirectory unknown_component range_v3_missing checkpoint_missing torch_missing cuda_missing bare_compiler)
set(installing_ways package unknown_component range_v3_missing checkpoint_missing torch_missing cuda_missing)
if(TARGET zero::range_v3)
  list(APPEND ways range_v3)
  list(APPEND installing_ways range_v3)
endif()
foreach(component IN ITEMS mpi checkpoint torch cuda nccl)
  if(TARGET zero::${component})
    list(APPEND ways ${component})
    list(APPEND installing_ways ${component})
  endif()
endforeach()
foreach(way IN LISTS ways)
  add_test(NAME consumer.${way}
    COMMAND ${CMAKE_COMMAND} -D WAY=${way} -D ZERO_SOURCE_DIR=${PROJECT_SOURCE_DIR}
            -D ZERO_BINARY_DIR=${PROJECT_BINARY_DIR} -D VERSION=${PROJECT_VERSION}
            -D WORK_DIR=${CMAKE_CURRENT_BINARY_DIR}/consumer/${way}
            -D GENERATOR=${CMAKE_GENERATOR} -D COMPILER=${CMAKE_CXX_COMPILER}
            -P ${CMAKE_CURRENT_LIST_DIR}/check.cmake)
  set_tests_properties(consumer.${way} PROPERTIES LABELS consumer TIMEOUT ${ZERO_TEST_TIMEOUT})
endforeach()
# Every installation writes its manifest into the same build folder.
list(TRANSFORM installing_ways PREPEND consumer.)
set_tests_properties(${installing_ways} PROPERTIES RESOURCE_LOCK install)
zero_label(consumer)
