# cmake -D WAY=… -D … -P check.cmake: see tests.cmake for the variables.

file(REMOVE_RECURSE ${WORK_DIR})
file(MAKE_DIRECTORY ${WORK_DIR})

# Runs a command that must succeed; its output is in `output` afterwards.
macro(must_run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message("${output}")
    string(REPLACE ";" " " command "${ARGV}")
    message(FATAL_ERROR "It failed: ${command}")
  endif()
endmacro()

set(configure ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -B ${WORK_DIR}/build -G ${GENERATOR}
    -D CMAKE_CXX_COMPILER=${COMPILER} -D CMAKE_BUILD_TYPE=Debug)

function(build_and_run_consumer)
  must_run(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
  must_run(${WORK_DIR}/build/consumer)
  if(NOT output MATCHES "zero ${VERSION}")
    message(FATAL_ERROR "Expected version ${VERSION}, got: ${output}")
  endif()
endfunction()

if(WAY STREQUAL "package")
  must_run(${CMAKE_COMMAND} --install ${ZERO_BINARY_DIR} --prefix ${WORK_DIR}/prefix)
  must_run(${configure} -D CMAKE_PREFIX_PATH=${WORK_DIR}/prefix)
  build_and_run_consumer()

elseif(WAY STREQUAL "subdirectory")
  # Downloads would fail, and every package that was looked for leaves an entry in the cache.
  must_run(${configure} -D ZERO_SOURCE_DIR=${ZERO_SOURCE_DIR} -D FETCHCONTENT_FULLY_DISCONNECTED=ON)
  file(STRINGS ${WORK_DIR}/build/CMakeCache.txt found REGEX "^[A-Za-z0-9_-]+_DIR:PATH=")
  if(found)
    message(FATAL_ERROR "As a subdirectory zero looked for: ${found}")
  endif()
  build_and_run_consumer()

elseif(WAY STREQUAL "unknown_component")
  must_run(${CMAKE_COMMAND} --install ${ZERO_BINARY_DIR} --prefix ${WORK_DIR}/prefix)
  execute_process(
    COMMAND ${configure} -D CMAKE_PREFIX_PATH=${WORK_DIR}/prefix -D ZERO_COMPONENTS=warp_drive
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status EQUAL 0 OR NOT output MATCHES "zero has no component \"warp_drive\"")
    message("${output}")
    message(FATAL_ERROR "An unknown component must be refused by name.")
  endif()

elseif(WAY STREQUAL "range_v3")
  must_run(${CMAKE_COMMAND} --install ${ZERO_BINARY_DIR} --prefix ${WORK_DIR}/prefix)
  must_run(${configure} -D CMAKE_PREFIX_PATH=${WORK_DIR}/prefix -D ZERO_COMPONENTS=range_v3)
  must_run(${CMAKE_COMMAND} --build ${WORK_DIR}/build --target views_consumer)
  must_run(${WORK_DIR}/build/views_consumer)

elseif(WAY MATCHES "^(mpi|checkpoint|torch|cuda|nccl)$")
  must_run(${CMAKE_COMMAND} --install ${ZERO_BINARY_DIR} --prefix ${WORK_DIR}/prefix)
  must_run(${configure} -D CMAKE_PREFIX_PATH=${WORK_DIR}/prefix -D ZERO_COMPONENTS=${WAY})
  must_run(${CMAKE_COMMAND} --build ${WORK_DIR}/build --target ${WAY}_consumer)
  must_run(${WORK_DIR}/build/${WAY}_consumer)

elseif(WAY STREQUAL "range_v3_missing")
  must_run(${CMAKE_COMMAND} --install ${ZERO_BINARY_DIR} --prefix ${WORK_DIR}/prefix)
  list(APPEND configure -D CMAKE_PREFIX_PATH=${WORK_DIR}/prefix
       -D CMAKE_DISABLE_FIND_PACKAGE_range-v3=ON)
  execute_process(COMMAND ${configure} -D ZERO_COMPONENTS=range_v3
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status EQUAL 0 OR NOT output MATCHES "component range_v3 needs range-v3")
    message("${output}")
    message(FATAL_ERROR "A component without its package must be refused by name.")
  endif()
  must_run(${configure} -D ZERO_COMPONENTS=)  # the core asks for nothing

elseif(WAY MATCHES "^(checkpoint|torch)_missing$")
  set(component ${CMAKE_MATCH_1})
  set(package_of_checkpoint nlohmann_json)
  set(package_of_torch Torch)
  must_run(${CMAKE_COMMAND} --install ${ZERO_BINARY_DIR} --prefix ${WORK_DIR}/prefix)
  list(APPEND configure -D CMAKE_PREFIX_PATH=${WORK_DIR}/prefix
       -D CMAKE_DISABLE_FIND_PACKAGE_${package_of_${component}}=ON)
  execute_process(COMMAND ${configure} -D ZERO_COMPONENTS=${component}
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status EQUAL 0 OR NOT output MATCHES "component ${component} needs (nlohmann_json|libtorch)")
    message("${output}")
    message(FATAL_ERROR "A component without its package must be refused by name.")
  endif()

elseif(WAY STREQUAL "cuda_missing")
  must_run(${CMAKE_COMMAND} --install ${ZERO_BINARY_DIR} --prefix ${WORK_DIR}/prefix)
  list(APPEND configure -D CMAKE_PREFIX_PATH=${WORK_DIR}/prefix
       -D CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON)
  foreach(component IN ITEMS cuda nccl)
    execute_process(COMMAND ${configure} -D ZERO_COMPONENTS=${component}
      RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(status EQUAL 0 OR NOT output MATCHES "component ${component} needs the CUDA[ \n]+Toolkit")
      message("${output}")
      message(FATAL_ERROR "A component without its package must be refused by name.")
    endif()
  endforeach()

elseif(WAY STREQUAL "bare_compiler")
  # What the README says: no build system, and not one warning.
  must_run(${COMPILER} -std=c++20 -Wall -Wextra -I${ZERO_SOURCE_DIR}/include
           ${ZERO_SOURCE_DIR}/examples/quickstart.cpp -o ${WORK_DIR}/quickstart)
  if(output)
    message("${output}")
    message(FATAL_ERROR "The quickstart compiles with warnings.")
  endif()
  must_run(${WORK_DIR}/quickstart)

else()
  message(FATAL_ERROR "No such way: ${WAY}")
endif()
