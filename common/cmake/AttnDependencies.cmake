# Libraries: from the system if they are there, else fetched. start.sh installs them on Debian/Ubuntu.
include(FetchContent)

# attn_fetch(<target> <name> <url> <sha or tag>): fetches a CMake project if <target> is missing.
function(attn_fetch target name repository tag)
  if(TARGET ${target})
    return()
  endif()
  message(STATUS "${name} not found on this machine: fetching ${repository} ${tag}")
  FetchContent_Declare(${name} GIT_REPOSITORY ${repository} GIT_TAG ${tag} GIT_SHALLOW ON)
  FetchContent_MakeAvailable(${name})
endfunction()

set(EIGEN_BUILD_TESTING OFF)
set(BENCHMARK_ENABLE_TESTING OFF)
set(JSON_BuildTests OFF)

find_package(Eigen3 3.4 QUIET NO_MODULE)
attn_fetch(Eigen3::Eigen Eigen3 https://gitlab.com/libeigen/eigen.git 3.4.0)
find_package(fmt QUIET)
attn_fetch(fmt::fmt fmt https://github.com/fmtlib/fmt.git 10.2.1)
find_package(CLI11 QUIET)
attn_fetch(CLI11::CLI11 CLI11 https://github.com/CLIUtils/CLI11.git v2.4.2)
find_package(nlohmann_json QUIET)
attn_fetch(nlohmann_json::nlohmann_json json https://github.com/nlohmann/json.git v3.11.3)
find_package(Catch2 QUIET)
attn_fetch(Catch2::Catch2 Catch2 https://github.com/catchorg/Catch2.git v3.5.4)
if(Catch2_SOURCE_DIR)
  list(APPEND CMAKE_MODULE_PATH ${Catch2_SOURCE_DIR}/extras)
endif()
include(Catch)
find_package(benchmark QUIET)
attn_fetch(benchmark::benchmark benchmark https://github.com/google/benchmark.git v1.8.3)

# Boost.Context is compiled code; it is linked statically, so that a program built on one machine
# runs on another.
set(Boost_USE_STATIC_LIBS ON)
find_package(Boost 1.71 QUIET COMPONENTS context)
attn_fetch(Boost::context Boost https://github.com/boostorg/boost.git boost-1.84.0)
find_package(Threads REQUIRED)
