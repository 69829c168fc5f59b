# Language standard, build type, warnings and sanitizers of everything here.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

option(ATTN_SANITIZE "AddressSanitizer and UndefinedBehaviorSanitizer for host code" OFF)
option(ATTN_WERROR "Warnings are errors" OFF)

# A second build of the same file costs nothing.
find_program(ATTN_CCACHE ccache)
if(ATTN_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${ATTN_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${ATTN_CCACHE})
endif()

# attn_warnings: what every target of ours compiles with.
add_library(attn_warnings INTERFACE)
target_compile_options(attn_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow $<$<BOOL:${ATTN_WERROR}>:-Werror>>)
if(ATTN_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=undefined>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>)
  add_link_options(-fsanitize=address,undefined)
endif()

# attn_emulated(<target>): its sources are kernels for the emulator. -O1: they run as fast as with -O2,
# for the emulator is what takes time, and compile in half the time. Kernels read vectors from arrays
# of elements, as CUDA allows; #pragma unroll is nvcc's; GCC's note on how it passes an over-aligned
# parameter (a tensor map) says nothing about a kernel. The compiler reports what they do to memory,
# and the emulator listens (emulator/accesses.cpp); lines are for its messages. No library of a
# sanitizer is linked.
function(attn_emulated target)
  target_compile_definitions(${target} PRIVATE ATTN_EMULATED)
  target_compile_options(${target} PRIVATE
    $<$<NOT:$<CONFIG:Debug>>:-O1> -fno-strict-aliasing -Wno-unknown-pragmas -Wno-psabi)
  if(NOT ATTN_SANITIZE)
    target_compile_options(${target} PRIVATE
      -fsanitize=thread,alignment -Wno-tsan $<$<NOT:$<CONFIG:Debug>>:-g1>)
  endif()
endfunction()
