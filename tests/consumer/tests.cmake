# Users' ways to zero, each tried from scratch in a folder of its own.
foreach(way IN ITEMS package subdirectory unknown_component bare_compiler)
  add_test(NAME consumer.${way}
    COMMAND ${CMAKE_COMMAND} -D WAY=${way} -D ZERO_SOURCE_DIR=${PROJECT_SOURCE_DIR}
            -D ZERO_BINARY_DIR=${PROJECT_BINARY_DIR} -D VERSION=${PROJECT_VERSION}
            -D WORK_DIR=${CMAKE_CURRENT_BINARY_DIR}/consumer/${way}
            -D GENERATOR=${CMAKE_GENERATOR} -D COMPILER=${CMAKE_CXX_COMPILER}
            -P ${CMAKE_CURRENT_LIST_DIR}/check.cmake)
  set_tests_properties(consumer.${way} PROPERTIES LABELS consumer TIMEOUT ${ZERO_TEST_TIMEOUT})
endforeach()
# Every installation writes its manifest into the same build folder.
set_tests_properties(consumer.package consumer.unknown_component PROPERTIES RESOURCE_LOCK install)
zero_label(consumer)
