# cmake --install build/release --prefix P [--component client|programs]
#   client    the client library: P/include/kvtide (include paths as in the tree), P/lib/kvtide/*.a,
#             and the CMake package: find_package(kvtide) -> kvtide::client
#   programs  P/bin
include(CMakePackageConfigHelpers)

set(KVT_CLIENT_LIBRARIES kvt_base kvt_layout kvt_index kvt_media kvt_transport kvt_wire kvt_client
    kvt_task_queue kvt_node_options kvt_worker)
# Where users start; what they include comes along (install_headers.cmake).
set(KVT_CLIENT_HEADERS kvstore/client/cluster_client.h kvstore/client/sequence_blocks.h
    kvstore/client/tier_client.h kernels/base/log.h)

foreach(library ${KVT_CLIENT_LIBRARIES})
  target_include_directories(${library} SYSTEM INTERFACE $<INSTALL_INTERFACE:include/kvtide>)
  target_compile_features(${library} PUBLIC cxx_std_20)
endforeach()
set_target_properties(kvt_worker PROPERTIES EXPORT_NAME client)

install(TARGETS ${KVT_CLIENT_LIBRARIES} EXPORT kvtide
        ARCHIVE DESTINATION lib/kvtide COMPONENT client)
install(EXPORT kvtide NAMESPACE kvtide:: FILE kvtideTargets.cmake
        DESTINATION lib/cmake/kvtide COMPONENT client)
configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/kvtideConfig.cmake.in ${CMAKE_BINARY_DIR}/kvtideConfig.cmake
  INSTALL_DESTINATION lib/cmake/kvtide)
# Before 1.0 a minor version may change the API (docs/CLIENT.md).
write_basic_package_version_file(${CMAKE_BINARY_DIR}/kvtideConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/kvtideConfig.cmake ${CMAKE_BINARY_DIR}/kvtideConfigVersion.cmake
        DESTINATION lib/cmake/kvtide COMPONENT client)
install(CODE "set(KVT_SOURCE_DIR \"${CMAKE_SOURCE_DIR}\")
set(KVT_CLIENT_HEADERS \"${KVT_CLIENT_HEADERS}\")" COMPONENT client)
install(SCRIPT ${CMAKE_CURRENT_LIST_DIR}/install_headers.cmake COMPONENT client)

install(TARGETS kvtide kvtide-coordinator kvtide-store kvtide-prefill kvtide-decode kvtide-run
        kvtide-calibrate
        RUNTIME DESTINATION bin COMPONENT programs)
