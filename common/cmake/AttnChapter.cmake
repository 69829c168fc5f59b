# Targets of a chapter, of a test, of kernels that exist on both back ends.

# attn_add_kernels(<target> FILES <a.cu> ... [HOPPER]): an object library with every file compiled twice: by the
# host compiler for the emulator, and by nvcc if there is one. HOPPER: for sm_90a alone.
function(attn_add_kernels target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "HOPPER" "" "FILES")
  set(emulated)
  foreach(file ${arg_FILES})
    get_filename_component(path ${file} ABSOLUTE)
    get_filename_component(name ${file} NAME_WE)
    set(wrapper ${CMAKE_CURRENT_BINARY_DIR}/emulated/${name}.cpp)
    # A path from the root, so that a compiler cache knows the file in another clone again.
    file(RELATIVE_PATH path ${PROJECT_SOURCE_DIR} ${path})
    file(CONFIGURE OUTPUT ${wrapper} CONTENT "#include \"${path}\"\n")
    list(APPEND emulated ${wrapper})
  endforeach()
  add_library(${target}_emulated OBJECT ${emulated})
  # Kernels read vectors from arrays of elements, as CUDA allows; #pragma unroll is nvcc's. GCC's note on how
  # it passes an over-aligned parameter (a tensor map) says nothing about a kernel.
  target_compile_definitions(${target}_emulated PRIVATE ATTN_EMULATED)
  target_compile_options(${target}_emulated PRIVATE
    $<$<NOT:$<CONFIG:Debug>>:-O2> -fno-strict-aliasing -Wno-unknown-pragmas -Wno-psabi)
  target_include_directories(${target}_emulated PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR})
  target_link_libraries(${target}_emulated PRIVATE attn attn_warnings)
  set(objects $<TARGET_OBJECTS:${target}_emulated>)
  if(ATTN_HAVE_CUDA)
    add_library(${target}_gpu OBJECT ${arg_FILES})
    # Denormal floats are 0: keeping them costs __expf three instructions more.
    target_compile_options(${target}_gpu PRIVATE
      $<$<COMPILE_LANGUAGE:CUDA>:-ftz=true --expt-relaxed-constexpr -lineinfo -Xcompiler=-Wall>)
    if(arg_HOPPER)
      set_target_properties(${target}_gpu PROPERTIES CUDA_ARCHITECTURES 90a-real)
    endif()
    target_include_directories(${target}_gpu PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
    target_link_libraries(${target}_gpu PRIVATE attn)
    list(APPEND objects $<TARGET_OBJECTS:${target}_gpu>)
  endif()
  set(${target}_OBJECTS ${objects} PARENT_SCOPE)
endfunction()

# attn_add_test(<name> SOURCES ... [OBJECTS ...]): a Catch2 program. Its cases become ctests one by one;
# those tagged [gpu] run together in <name>.gpu, which is skipped (77) where there is no GPU.
function(attn_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;OBJECTS;LABELS")
  if(NOT TARGET attn_test_main)  # Catch2's own half, compiled once for all
    add_library(attn_test_main OBJECT ${PROJECT_SOURCE_DIR}/common/tests/main.cpp)
    target_link_libraries(attn_test_main PRIVATE attn attn_warnings Catch2::Catch2)
  endif()
  add_executable(${name} ${arg_SOURCES} ${arg_OBJECTS} $<TARGET_OBJECTS:attn_test_main>)
  target_compile_definitions(${name} PRIVATE
    ATTN_FIXTURES="${PROJECT_SOURCE_DIR}/common/tests/fixtures"
    ATTN_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE attn attn_warnings Catch2::Catch2)
  catch_discover_tests(${name} TEST_SPEC "~[gpu]" TEST_PREFIX "${name}: "
                       TEST_LIST ${name}_CASES PROPERTIES TIMEOUT 600)
  # Catch's script takes a list of labels apart: they are set when ctest has read what it wrote.
  set(labels ${CMAKE_CURRENT_BINARY_DIR}/${name}_labels.cmake)
  file(CONFIGURE OUTPUT ${labels} @ONLY CONTENT
"foreach(case IN LISTS @name@_CASES)
  set_tests_properties(\"\${case}\" PROPERTIES LABELS \"cpu;@arg_LABELS@\")
endforeach()
")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${labels})
  foreach(source ${arg_SOURCES})
    file(READ ${source} text)
    if(text MATCHES "\\[gpu\\]")
      add_test(NAME ${name}.gpu COMMAND ${name} "[gpu]")
      set_tests_properties(${name}.gpu PROPERTIES LABELS "gpu;${arg_LABELS}" SKIP_RETURN_CODE 77)
      break()
    endif()
  endforeach()
endfunction()

# attn_add_chapter(<chapter> STEPS <step> ... [HOPPER] [TESTS <more.cpp> ...]): the program, its benchmark and
# its tests, from <step>.cu, chapter.cpp, test.cpp and those named.
function(attn_add_chapter chapter)
  cmake_parse_arguments(PARSE_ARGV 1 arg "HOPPER" "PARENT" "STEPS;TESTS")
  set(files)
  foreach(step ${arg_STEPS})
    list(APPEND files ${step}.cu)
  endforeach()
  set(hopper)
  if(arg_HOPPER)
    set(hopper HOPPER)
  endif()
  attn_add_kernels(${chapter} ${hopper} FILES ${files})
  add_library(${chapter}_table OBJECT chapter.cpp)
  target_link_libraries(${chapter}_table PRIVATE attn attn_warnings)
  set(objects ${${chapter}_OBJECTS} $<TARGET_OBJECTS:${chapter}_table>)
  set(${chapter}_ALL_OBJECTS ${objects} PARENT_SCOPE)  # for attn_add_exercise
  set(${chapter}_HOPPER "${hopper}" PARENT_SCOPE)

  add_executable(${chapter} ${PROJECT_SOURCE_DIR}/common/attn/main.cpp ${objects})
  target_link_libraries(${chapter} PRIVATE attn attn_warnings)
  add_executable(bench_${chapter} ${PROJECT_SOURCE_DIR}/common/attn/bench_main.cpp ${objects})
  target_link_libraries(bench_${chapter} PRIVATE attn attn_warnings benchmark::benchmark)
  attn_add_test(test_${chapter} SOURCES test.cpp ${arg_TESTS} ${PROJECT_SOURCE_DIR}/common/tests/test_model.cpp OBJECTS ${objects} LABELS ${chapter})

  # diff_01_v1_v2 and so on: the lesson of a step is its difference from the one before.
  string(SUBSTRING ${chapter} 0 2 number)
  set(previous)
  foreach(step ${arg_STEPS})
    string(REGEX MATCH "^[a-z]+" family ${step})
    if(DEFINED last_of_${family})
      string(REGEX REPLACE "_.*" "" from ${last_of_${family}})
      string(REGEX REPLACE "_.*" "" to ${step})
      attn_add_diff(diff_${number}_${from}_${to}
        ${CMAKE_CURRENT_SOURCE_DIR}/${last_of_${family}}.cu ${CMAKE_CURRENT_SOURCE_DIR}/${step}.cu)
    endif()
    set(last_of_${family} ${step})
  endforeach()
  if(arg_PARENT)
    list(GET arg_STEPS 0 first)
    attn_add_diff(diff_parent_${number} ${PROJECT_SOURCE_DIR}/${arg_PARENT}.cu
                  ${CMAKE_CURRENT_SOURCE_DIR}/${first}.cu)
  endif()
endfunction()

# attn_add_broken_step(<step> <number> <from> <to>): a test that the emulator notices when the text <from>, which
# occurs once in <step>.cu, is replaced by <to>. CMake stops where it does not: the step has changed.
function(attn_add_broken_step step number from to)
  file(READ ${CMAKE_CURRENT_SOURCE_DIR}/${step}.cu text)
  string(FIND "${text}" "${from}" first)
  string(FIND "${text}" "${from}" last REVERSE)
  if(first EQUAL -1 OR NOT first EQUAL last)
    message(FATAL_ERROR "attn_add_broken_step: '${from}' does not occur once in ${step}.cu")
  endif()
  string(REPLACE "${from}" "${to}" text "${text}")
  set(target broken_${step}_${number})
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/broken/${target}.cpp CONTENT "@text@" @ONLY)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${step}.cu)
  if(NOT TARGET broken_${step}_main)
    add_library(broken_${step}_main OBJECT ${PROJECT_SOURCE_DIR}/common/tests/broken_step.cpp)
    target_compile_definitions(broken_${step}_main PRIVATE ATTN_BROKEN_STEP=${step})
    target_link_libraries(broken_${step}_main PRIVATE attn)
  endif()
  add_executable(${target} ${CMAKE_CURRENT_BINARY_DIR}/broken/${target}.cpp $<TARGET_OBJECTS:broken_${step}_main>)
  target_compile_definitions(${target} PRIVATE ATTN_EMULATED)
  target_compile_options(${target} PRIVATE -O1 -fno-strict-aliasing -Wno-unknown-pragmas)
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_link_libraries(${target} PRIVATE attn)
  add_test(NAME "broken: ${step}: ${from}" COMMAND ${target})
  set_tests_properties("broken: ${step}: ${from}" PROPERTIES LABELS "cpu;broken" TIMEOUT 300)
endfunction()

# attn_add_diff(<target> <from> <to>): prints the difference; that there is one is no failure.
function(attn_add_diff target from to)
  add_custom_target(${target}
    COMMAND git --no-pager diff --no-index --ignore-all-space --function-context ${from} ${to} || true
    VERBATIM USES_TERMINAL)
endfunction()
