include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(zero_package_dir ${CMAKE_INSTALL_DATADIR}/cmake/zero)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/zero DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh")
install(TARGETS zero EXPORT zeroTargets INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT zeroTargets NAMESPACE zero:: DESTINATION ${zero_package_dir})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/zeroConfig.cmake.in
  ${PROJECT_BINARY_DIR}/zeroConfig.cmake INSTALL_DESTINATION ${zero_package_dir})
# Before 1.0 a new minor version may break its users.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/zeroConfigVersion.cmake
  COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES ${PROJECT_BINARY_DIR}/zeroConfig.cmake ${PROJECT_BINARY_DIR}/zeroConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/FindNCCL.cmake
        DESTINATION ${zero_package_dir})
