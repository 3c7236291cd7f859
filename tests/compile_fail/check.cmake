# cmake -D VARIANT=wrong|twin -D COMPILER=… -D PRECOMPILED=… -D INCLUDE=… -D SOURCE=… -P check.cmake

file(STRINGS ${SOURCE} line REGEX "^// expect: " LIMIT_COUNT 1)
if(NOT line MATCHES "^// expect: (.+)$")
  message(FATAL_ERROR "${SOURCE} lacks a line: // expect: REGEX")
endif()
set(expected "${CMAKE_MATCH_1}")

set(define "")
if(VARIANT STREQUAL "wrong")
  set(define -DZERO_COMPILE_FAIL=1)
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
