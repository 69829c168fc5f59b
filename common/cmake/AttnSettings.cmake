# Language standard, build type, warnings and sanitizers of all targets.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# Objects are compiled once, for programs and for libattention (common/api).
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
# Weak symbols instead: objcopy cannot make unique ones local to a chapter (common/api/join.sh).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fno-gnu-unique>
                      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-fno-gnu-unique>)
endif()

option(ATTN_SANITIZE "AddressSanitizer and UndefinedBehaviorSanitizer for host code" OFF)
option(ATTN_WERROR "Warnings are errors" OFF)

# A second build of the same file costs nothing.
find_program(ATTN_CCACHE ccache)
if(ATTN_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${ATTN_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${ATTN_CCACHE})
endif()

# attn_warnings: compile options of all our targets.
add_library(attn_warnings INTERFACE)
target_compile_options(attn_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow $<$<BOOL:${ATTN_WERROR}>:-Werror>>)
if(ATTN_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=undefined>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>)
  add_link_options(-fsanitize=address,undefined)
endif()

# attn_emulated(<target>): compiles kernels for the emulator. -O1 halves the compile time, and
# kernels run as fast as with -O2, since the emulator takes most of the time. Kernels read vectors
# from arrays of elements, as CUDA allows; #pragma unroll is nvcc's; GCC's note on passing an
# over-aligned parameter (a tensor map) does not concern a kernel. The compiler instruments memory
# accesses for the emulator (emulator/accesses.cpp); line information is for its messages. No
# sanitizer library is linked.
function(attn_emulated target)
  target_compile_definitions(${target} PRIVATE ATTN_EMULATED)
  target_compile_options(${target} PRIVATE
    $<$<NOT:$<CONFIG:Debug>>:-O1> -fno-strict-aliasing -Wno-unknown-pragmas -Wno-psabi)
  if(NOT ATTN_SANITIZE)
    target_compile_options(${target} PRIVATE
      -fsanitize=thread,alignment -Wno-tsan $<$<NOT:$<CONFIG:Debug>>:-g1>)
  endif()
endfunction()
