# cmake -D VARIANT=wrong|twin -D COMPILER=… -D PRECOMPILED=… -D INCLUDE=… -D SOURCE=…
#       [-D CUDA_INCLUDE=…] [-D TORCH_INCLUDE=…] -P check.cmake

file(STRINGS ${SOURCE} line REGEX "^// expect: " LIMIT_COUNT 1)
if(NOT line MATCHES "^// expect: (.+)$")
  message(FATAL_ERROR "${SOURCE} lacks a line: // expect: REGEX")
endif()
set(expected "${CMAKE_MATCH_1}")

set(define "")
if(VARIANT STREQUAL "wrong")
  set(define -DZERO_COMPILE_FAIL=1)
endif()
get_filename_component(name ${SOURCE} NAME)
if(name MATCHES "^cuda_")
  get_filename_component(tests ${CMAKE_CURRENT_LIST_DIR} DIRECTORY)
  list(APPEND define -DZERO_CUDA_EMULATED=1 -I ${tests} -include ${tests}/fake/emulation.hpp)
  foreach(directory IN LISTS CUDA_INCLUDE)
    list(APPEND define -isystem ${directory})
  endforeach()
endif()
if(name MATCHES "^torch_")
  list(REMOVE_ITEM TORCH_INCLUDE /usr/include)  # whose order against g++'s own headers matters
  foreach(directory IN LISTS TORCH_INCLUDE)
    list(APPEND define -isystem ${directory})
  endforeach()
endif()
set(ENV{LC_ALL} C)
execute_process(
  COMMAND ${COMPILER} -std=c++20 -fsyntax-only ${define} -I ${PRECOMPILED} -I ${INCLUDE} ${SOURCE}
  RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)

if(VARIANT STREQUAL "twin")
  if(NOT status EQUAL 0)
    message("${output}")
    message(FATAL_ERROR "The twin must compile.")
  endif()
elseif(status EQUAL 0)
  message(FATAL_ERROR "It compiles, but must fail with: ${expected}")
elseif(NOT output MATCHES "error: [^\n]*(${expected})")
  # Only errors count: notes and quoted source lines would also match for the wrong reason.
  message("${output}")
  message(FATAL_ERROR "It fails, but no error matches: ${expected}")
endif()
