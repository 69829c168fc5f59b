# Targets of chapters, of tests, and of kernels for both back ends.

# Speeds up complete builds, but not the rebuild of one step: nvcc needs 25 s of processor time for
# four steps of 04 separately, 10 s together.
set(ATTN_TOGETHER 1 CACHE STRING "steps of a chapter that are one compile unit")

# attn_together(<out units> <out alone> <extension> <file> ...): writes files that include several
# of <file> each, all of one ladder. v4_tiled.cu and b1_global.cu are grouped by ATTN_TOGETHER.
# Other ladders, such as f1_fp8.cu, form one unit each, and q and s of the emulator form one unit
# together. Otherwise two units would instantiate the same kernel next to other kernels, which does
# not link: the entries of a unit's functions (patchable_function_entry, emulator/cuda_names.h)
# share one section. Files that are not named like a step stay separate: programs link them by name.
function(attn_together out_units out_alone extension)
  set(alone ${ARGN})
  set(units)
  set(ladders v b f q d s)
  if(extension STREQUAL cpp)
    set(ladders v b f qs d)
  endif()
  foreach(ladder ${ladders})
    set(steps ${ARGN})
    list(FILTER steps INCLUDE REGEX "/[${ladder}][0-9]+_[a-z0-9_]+\\.cu$")
    set(at_once ${ATTN_TOGETHER})
    if(NOT ladder MATCHES "[vb]")
      list(LENGTH steps at_once)
    endif()
    list(REMOVE_ITEM alone ${steps})
    while(steps)
      list(SUBLIST steps 0 ${at_once} some)
      list(REMOVE_ITEM steps ${some})
      set(text)
      foreach(file ${some})
        file(RELATIVE_PATH file ${PROJECT_SOURCE_DIR} ${file})
        string(APPEND text "#include \"${file}\"\n")
      endforeach()
      list(GET some 0 first)
      get_filename_component(first ${first} NAME_WE)
      set(unit ${CMAKE_CURRENT_BINARY_DIR}/together/from_${first}.${extension})
      file(CONFIGURE OUTPUT ${unit} CONTENT "${text}" @ONLY)
      list(APPEND units ${unit})
    endwhile()
  endforeach()
  set(${out_units} "${units}" PARENT_SCOPE)
  set(${out_alone} "${alone}" PARENT_SCOPE)
endfunction()

# attn_add_kernels(<target> FILES <a.cu> ... [HOPPER]): an object library with every file compiled
# twice: by the host compiler for the emulator, and by nvcc if available. HOPPER: only for sm_90a.
function(attn_add_kernels target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "HOPPER" "" "FILES")
  set(files)
  foreach(file ${arg_FILES})
    get_filename_component(path ${file} ABSOLUTE)
    list(APPEND files ${path})
  endforeach()
  set(emulated)
  set(alone ${files})
  if(ATTN_TOGETHER GREATER 1)
    attn_together(emulated alone cpp ${files})
  endif()
  foreach(path ${alone})
    get_filename_component(name ${path} NAME_WE)
    set(wrapper ${CMAKE_CURRENT_BINARY_DIR}/emulated/${name}.cpp)
    # A path relative to the root lets a compiler cache recognise the file in another clone.
    file(RELATIVE_PATH path ${PROJECT_SOURCE_DIR} ${path})
    file(CONFIGURE OUTPUT ${wrapper} CONTENT "#include \"${path}\"\n")
    list(APPEND emulated ${wrapper})
  endforeach()
  add_library(${target}_emulated OBJECT ${emulated})
  attn_emulated(${target}_emulated)
  target_include_directories(${target}_emulated PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR})
  target_link_libraries(${target}_emulated PRIVATE attn_device attn_warnings)
  set(objects $<TARGET_OBJECTS:${target}_emulated>)
  if(ATTN_HAVE_CUDA)
    if(ATTN_TOGETHER GREATER 1)
      attn_together(files alone cu ${files})
      list(APPEND files ${alone})
    endif()
    add_library(${target}_gpu OBJECT ${files})
    # Flush denormal floats to 0: keeping them costs __expf three more instructions.
    target_compile_options(${target}_gpu PRIVATE
      $<$<COMPILE_LANGUAGE:CUDA>:-ftz=true --expt-relaxed-constexpr -lineinfo -Xcompiler=-Wall>)
    if(arg_HOPPER)
      set_target_properties(${target}_gpu PROPERTIES CUDA_ARCHITECTURES 90a-real)
    endif()
    target_include_directories(${target}_gpu PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
    if(ATTN_TOGETHER GREATER 1)
      target_include_directories(${target}_gpu PRIVATE ${PROJECT_SOURCE_DIR})
    endif()
    target_link_libraries(${target}_gpu PRIVATE attn_device)
    list(APPEND objects $<TARGET_OBJECTS:${target}_gpu>)
  endif()
  set(${target}_OBJECTS ${objects} PARENT_SCOPE)
endfunction()

# attn_test_settings(<target> <attn>): compile settings of a test.
function(attn_test_settings target library)
  target_compile_definitions(${target} PRIVATE
    ATTN_FIXTURES="${PROJECT_SOURCE_DIR}/common/tests/fixtures"
    ATTN_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  # Tests are compiled more often than run.
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  target_link_libraries(${target} PRIVATE ${library} attn_warnings Catch2::Catch2)
endfunction()

# attn_add_test(<name> SOURCES ... [OBJECTS ...] [LIBRARY <attn>]): a Catch2 program. Each case is a
# ctest; those tagged [gpu] run together in <name>.gpu, which is skipped (77) without a GPU.
function(attn_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "LIBRARY" "SOURCES;OBJECTS;LABELS")
  if(NOT arg_LIBRARY)
    set(arg_LIBRARY attn)
  endif()
  if(NOT TARGET attn_test_main)  # Catch2's main, compiled once for all tests
    add_library(attn_test_main OBJECT ${PROJECT_SOURCE_DIR}/common/tests/main.cpp)
    target_link_libraries(attn_test_main PRIVATE attn_device attn_warnings Catch2::Catch2)
    if(ATTN_SANITIZE)  # Catch2 itself is not under test, and instrumenting it takes minutes
      target_compile_options(attn_test_main PRIVATE -O1 -fno-sanitize=all)
    endif()
  endif()
  add_executable(${name} ${arg_SOURCES} ${arg_OBJECTS} $<TARGET_OBJECTS:attn_test_main>)
  attn_test_settings(${name} ${arg_LIBRARY})
  target_include_directories(${name} BEFORE PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  catch_discover_tests(${name} TEST_SPEC "~[gpu]" TEST_PREFIX "${name}: "
                       TEST_LIST ${name}_CASES
                       PROPERTIES TIMEOUT 600)
  # Catch's script splits a list of labels, so they are set when ctest has read its output. The
  # tests of a chapter run first because they are long: at the end, short ones fill all cores.
  set(labels ${CMAKE_CURRENT_BINARY_DIR}/${name}_labels.cmake)
  set(cost 0)
  if(name MATCHES "^test_0[0-9]_")
    set(cost 100)
  endif()
  file(CONFIGURE OUTPUT ${labels} @ONLY CONTENT
"foreach(case IN LISTS @name@_CASES)
  set_tests_properties(\"\${case}\" PROPERTIES LABELS \"cpu;@arg_LABELS@\" COST @cost@
                       SKIP_RETURN_CODE 77)
endforeach()
")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${labels})
  foreach(source ${arg_SOURCES})
    file(READ ${source} text)
    if(text MATCHES "TEST_CASE\\(\"[^\"]*;")  # CMake would split it into two cases and run neither
      message(FATAL_ERROR "${source}: a semicolon in the name of a test")
    endif()
    if(text MATCHES "\\[gpu\\]")
      add_test(NAME ${name}.gpu COMMAND ${name} "[gpu]")
      set_tests_properties(${name}.gpu PROPERTIES LABELS "gpu;${arg_LABELS}" SKIP_RETURN_CODE 77)
      break()
    endif()
  endforeach()
endfunction()

# attn_attention_of(<out> <step file>): the step whose attention kernel this step launches, from its
# line ATTN_ATTENTION_OF(f4_block_scales); empty if the step has its own kernel.
function(attn_attention_of out file)
  file(STRINGS ${file} line REGEX "^ATTN_ATTENTION_OF\\(")
  string(REGEX REPLACE "^ATTN_ATTENTION_OF\\(([a-z0-9_]+).*" "\\1" step "${line}")
  set(${out} "${step}" PARENT_SCOPE)
endfunction()

# attn_add_chapter(<chapter> STEPS <step> ... [HOPPER] [PARENT <chapter>/<step>] [TESTS <more.cpp>
#                  ...] [SHARED <kernel> ...] [LINKED <chapter>/<step> ...] [HOPPER_STEPS <step> ...]
#                  [FIRST_STEPS <step> ...]):
# the program, its benchmark and its tests, from <step>.cu, chapter.cpp and the files of its
# folders: kernels/*.cu (prepare kernels), host/*.cpp (operations and planners), tests/*.cpp.
# SHARED: kernels of common/kernels. LINKED: steps for sm_90a of other chapters, whose
# launch() steps of this one call. HOPPER_STEPS: the STEPS that are only for sm_90a. FIRST_STEPS:
# the first steps of an operation, which may differ from their parents as much as a chapter's first
# step.
function(attn_add_chapter chapter)
  cmake_parse_arguments(PARSE_ARGV 1 arg "HOPPER" "PARENT"
                        "STEPS;TESTS;SHARED;HOPPER_STEPS;FIRST_STEPS;LINKED")
  file(GLOB kernels CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/kernels/*.cu)
  foreach(shared ${arg_SHARED})
    list(APPEND kernels ${PROJECT_SOURCE_DIR}/common/kernels/${shared}.cu)
  endforeach()
  file(GLOB host CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/host/*.cpp)
  file(GLOB tests CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/*.cpp)
  set(files)
  set(hopper_files)
  foreach(step ${arg_STEPS})
    if(step IN_LIST arg_HOPPER_STEPS)
      list(APPEND hopper_files ${step}.cu)
    else()
      list(APPEND files ${step}.cu)
    endif()
  endforeach()
  set(hopper)
  if(arg_HOPPER)
    set(hopper HOPPER)
  endif()
  attn_add_kernels(${chapter} ${hopper} FILES ${files} ${kernels})
  if(hopper_files)
    attn_add_kernels(${chapter}_hopper HOPPER FILES ${hopper_files})
    # If a kernel is in two units, the linker keeps the first. The emulator's list of a unit's
    # kernels (attn_together) does not link without all of them, or is dropped. So in 08 the unit of
    # q9 loses its list, not that of q and s.
    if(ATTN_TOGETHER GREATER 1)
      list(PREPEND ${chapter}_OBJECTS ${${chapter}_hopper_OBJECTS})
    else()
      list(APPEND ${chapter}_OBJECTS ${${chapter}_hopper_OBJECTS})
    endif()
  endif()
  if(arg_LINKED)
    list(TRANSFORM arg_LINKED REPLACE "(.+)" "${PROJECT_SOURCE_DIR}/\\1.cu")
    attn_add_kernels(${chapter}_linked HOPPER FILES ${arg_LINKED})
    list(APPEND ${chapter}_OBJECTS ${${chapter}_linked_OBJECTS})
  endif()
  add_library(${chapter}_table OBJECT chapter.cpp ${host})
  target_include_directories(${chapter}_table PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_link_libraries(${chapter}_table PRIVATE attn attn_warnings)
  set(objects ${${chapter}_OBJECTS} $<TARGET_OBJECTS:${chapter}_table>)
  set_property(GLOBAL APPEND PROPERTY ATTN_CHAPTERS ${chapter})  # for libattention
  set_property(GLOBAL PROPERTY ${chapter}_LIBRARY ${objects})
  set(${chapter}_OBJECTS ${${chapter}_OBJECTS} PARENT_SCOPE)  # for attn_add_exercise
  set(${chapter}_HOPPER "${hopper}" PARENT_SCOPE)
  set(${chapter}_HOPPER_STEPS "${arg_HOPPER_STEPS}" PARENT_SCOPE)

  if(NOT TARGET attn_chapter_main)  # shared by all chapters, compiled once
    set(common ${PROJECT_SOURCE_DIR}/common)
    add_library(attn_chapter_main OBJECT ${common}/run/main.cpp)
    target_link_libraries(attn_chapter_main PRIVATE attn attn_warnings)
    add_library(attn_bench_main OBJECT ${common}/run/bench_main.cpp)
    target_link_libraries(attn_bench_main PRIVATE attn attn_warnings benchmark::benchmark)
    add_library(attn_chapter_tests OBJECT ${common}/tests/test_model.cpp
                                          ${common}/tests/test_schedules.cpp
                                          ${common}/tests/test_not_finite.cpp
                                          ${common}/tests/test_e4m3_steps.cpp
                                          ${common}/tests/test_launches.cpp
                                          ${common}/report/code_keys.cpp  # for test_model.cpp
                                          ${common}/report/containers.cpp
                                          ${common}/report/sha256.cpp ${common}/report/tokens.cpp)
    attn_test_settings(attn_chapter_tests attn)
  endif()
  add_executable(${chapter} $<TARGET_OBJECTS:attn_chapter_main> ${objects})
  target_link_libraries(${chapter} PRIVATE attn attn_warnings)
  # --timeline sees special functions (emulator/timeline.cpp).
  target_link_options(${chapter} PRIVATE "LINKER:--wrap=exp2f,--wrap=expf,--wrap=logf"
                                         "LINKER:--wrap=log2f,--wrap=tanhf")
  add_executable(bench_${chapter} $<TARGET_OBJECTS:attn_bench_main> ${objects})
  target_link_libraries(bench_${chapter} PRIVATE attn attn_warnings benchmark::benchmark)
  attn_add_test(test_${chapter} SOURCES ${tests} ${arg_TESTS}
                OBJECTS $<TARGET_OBJECTS:attn_chapter_tests> ${objects} LABELS ${chapter})

  # diff_01_v1_v2 and so on: the difference between a step and its parent, which its header
  # declares. A step that launches its parent's attention kernel is printed completely. Its children
  # are compared with the file that contains the kernel.
  string(SUBSTRING ${chapter} 0 2 number)
  foreach(step ${arg_STEPS})
    file(STRINGS ${step}.cu header LIMIT_COUNT 5 REGEX "^// parent ")
    string(REGEX REPLACE "^// parent +([a-z0-9_/]+).*" "\\1" parent "${header}")
    if(NOT parent IN_LIST arg_STEPS)
      continue()
    endif()
    string(REGEX REPLACE "_.*" "" from ${parent})
    string(REGEX REPLACE "_.*" "" to ${step})
    attn_attention_of(launched ${step}.cu)
    if(launched)
      attn_add_diff(diff_${number}_${from}_${to} /dev/null ${CMAKE_CURRENT_SOURCE_DIR}/${step}.cu)
    else()
      attn_attention_of(launched ${parent}.cu)
      if(launched)
        set(parent ${launched})
      endif()
      attn_add_diff(diff_${number}_${from}_${to}
        ${CMAKE_CURRENT_SOURCE_DIR}/${parent}.cu ${CMAKE_CURRENT_SOURCE_DIR}/${step}.cu)
    endif()
    string(REGEX REPLACE "[0-9]+$" "" from ${from})
    string(REGEX REPLACE "[0-9]+$" "" to ${to})
    if(from STREQUAL to)  # a backward pass is not derived from a forward pass
      set(budget 80)
      if(step IN_LIST arg_FIRST_STEPS)
        set(budget 180)
      endif()
      set_property(GLOBAL APPEND_STRING PROPERTY ATTN_DIFFS "${budget} ${chapter}/${parent} ${chapter}/${step}\n")
    endif()
  endforeach()
  if(arg_PARENT)
    list(GET arg_STEPS 0 first)
    attn_add_diff(diff_parent_${number} ${PROJECT_SOURCE_DIR}/${arg_PARENT}.cu
                  ${CMAKE_CURRENT_SOURCE_DIR}/${first}.cu)
    set_property(GLOBAL APPEND_STRING PROPERTY ATTN_DIFFS "180 ${arg_PARENT} ${chapter}/${first}\n")
  endif()
endfunction()

# attn_add_sweep(<chapter> <name> <architecture> [KERNELS]): host/<name>.cu, which times tile
# configurations on a GPU, as the target <name>_<chapter>, built on demand. KERNELS: links the
# chapter's kernels.
function(attn_add_sweep chapter name architecture)
  if(NOT ATTN_HAVE_CUDA)
    return()
  endif()
  set(objects)
  if("KERNELS" IN_LIST ARGN)
    set(objects $<TARGET_OBJECTS:${chapter}_gpu>)
    if(TARGET ${chapter}_hopper_gpu)
      list(APPEND objects $<TARGET_OBJECTS:${chapter}_hopper_gpu>)
    endif()
  endif()
  add_executable(${name}_${chapter} EXCLUDE_FROM_ALL host/${name}.cu ${objects})
  set_target_properties(${name}_${chapter} PROPERTIES CUDA_ARCHITECTURES ${architecture})
  target_compile_options(${name}_${chapter}
    PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-ftz=true --expt-relaxed-constexpr -lineinfo -Xcompiler=-Wall>)
  target_link_libraries(${name}_${chapter} PRIVATE attn)
endfunction()

# attn_diff_budget(<chapter> <step> <lines> <reason>): allows a step to differ from its parent in
# more than the 80 lines of a chapter, or the 180 of a chapter's first step.
# common/tests/cli/step_diffs.sh counts them.
function(attn_diff_budget chapter step lines reason)
  set_property(GLOBAL APPEND_STRING PROPERTY ATTN_DIFF_BUDGETS "${lines} ${chapter}/${step} ${reason}\n")
endfunction()

# attn_diff_parent(<chapter> <step> <parent> [FIRST]): a later step whose parent, <chapter>/<step>,
# is in another chapter. FIRST: it is the first of an operation and may differ as much as a
# chapter's first step.
function(attn_diff_parent chapter step parent)
  string(SUBSTRING ${chapter} 0 2 number)
  string(REGEX REPLACE "_.*" "" to ${step})
  attn_add_diff(diff_parent_${number}_${to} ${PROJECT_SOURCE_DIR}/${parent}.cu
                ${CMAKE_CURRENT_SOURCE_DIR}/${step}.cu)
  set(budget 80)
  if("FIRST" IN_LIST ARGN)
    set(budget 180)
  endif()
  set_property(GLOBAL APPEND_STRING PROPERTY ATTN_DIFFS "${budget} ${parent} ${chapter}/${step}\n")
endfunction()

# attn_inline_headers(<text>): replaces #include lines of the step's text by the headers of
# kernels/, of this chapter and of common, that contain back-end code. Headers shared by host and
# kernels stay included.
function(attn_inline_headers out)
  set(text "${${out}}")
  set(seen)
  set(shared)
  while(TRUE)
    set(header)
    string(REGEX MATCHALL "#include \"kernels/[a-z0-9_/]+\\.h\"\n" includes "${text}")
    foreach(include IN LISTS includes)
      string(REGEX REPLACE ".*\"(.*)\".*" "\\1" name "${include}")
      if(NOT header AND NOT name IN_LIST shared)
        set(header ${name})
        set(line "${include}")
      endif()
    endforeach()
    if(NOT header)
      break()
    endif()
    set(content)
    if(NOT header IN_LIST seen)
      set(path ${CMAKE_CURRENT_SOURCE_DIR}/${header})
      if(NOT EXISTS ${path})
        set(path ${PROJECT_SOURCE_DIR}/common/${header})
      endif()
      attn_read(content ${path})
      if(NOT content MATCHES "namespace ATTN_BACKEND")
        list(APPEND shared ${header})
        continue()
      endif()
      string(REPLACE "#pragma once\n" "" content "${content}")
      set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${path})
    endif()
    list(APPEND seen ${header})
    string(FIND "${text}" "${line}" at)
    string(LENGTH "${line}" length)
    string(SUBSTRING "${text}" 0 ${at} before)
    math(EXPR at "${at} + ${length}")
    string(SUBSTRING "${text}" ${at} -1 after)
    set(text "${before}${content}${after}")
  endwhile()
  set(${out} "${text}" PARENT_SCOPE)
endfunction()

# attn_step_copy(<out> <step> <name> <text>): writes <out>: <text>, that of <step>.cu, in a
# namespace <name>. A copy has only the kernels that small tests run: of 16 bits only bf16, head
# dims up to 64.
function(attn_step_copy out step name text)
  # Also of headers that the text already contains.
  string(REGEX MATCHALL "namespace ATTN_BACKEND::[a-z0-9_]+ {" spaces "${text}")
  list(REMOVE_DUPLICATES spaces)
  foreach(space IN LISTS spaces)
    string(REGEX REPLACE ".*::([a-z0-9_]+) {" "\\1" space "${space}")
    if(NOT space STREQUAL step)
      string(REPLACE "ATTN_BACKEND::${space}" "ATTN_BACKEND::${space}_${name}" text "${text}")
      string(REPLACE "using namespace ${space};" "using namespace ${space}_${name};" text "${text}")
      string(REGEX REPLACE "([^A-Za-z0-9_:])${space}::" "\\1${space}_${name}::" text "${text}")
    endif()
  endforeach()
  string(REPLACE "ATTN_BACKEND::${step}" "ATTN_BACKEND::${name}" text "${text}")
  string(REPLACE "dispatch_16bit(" "dispatch_bf16(" text "${text}")
  string(REGEX REPLACE "\n *case (128|256): return (launch|launch_attention|attend)<[^\n]*" ""
         text "${text}")
  string(REPLACE "ATTN_BACKEND::${name} {\nusing namespace attn;\n" "ATTN_BACKEND::${name} {
using namespace attn;
template <class Body>
Status dispatch_bf16(DType dtype, Body body) {
  if (dtype != DType::bf16) return Status::unsupported(\"this copy has bf16 alone\");
  return body.template operator()<__nv_bfloat16>();
}
" text "${text}")
  file(CONFIGURE OUTPUT ${out} CONTENT "@text@" @ONLY)
endfunction()

# attn_edited(<out rows> <folder> <suffix> <numbered> <text file> <edits file> ...): the versions of
# a text that edit.awk writes to <folder>; rows: its output for each.
function(attn_edited out_rows folder suffix numbered text_file)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${ARGN} ${PROJECT_SOURCE_DIR}/common/cmake/edit.awk)
  find_program(ATTN_AWK NAMES awk gawk mawk REQUIRED)
  mark_as_advanced(ATTN_AWK)
  file(MAKE_DIRECTORY ${folder})
  execute_process(COMMAND ${ATTN_AWK} -v numbered=${numbered} -v out=${folder}/ -v suffix=${suffix}
                          -f ${PROJECT_SOURCE_DIR}/common/cmake/edit.awk ${ARGN} ${text_file}
                  OUTPUT_VARIABLE rows ERROR_VARIABLE error RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${text_file} has changed: ${error}")
  endif()
  set(${out_rows} "${rows}" PARENT_SCOPE)
endfunction()

# attn_next_row(<inout rows> <out name> <out directive>): removes the first of these rows. A CMake
# list would be split at every semicolon.
function(attn_next_row inout name directive)
  string(FIND "${${inout}}" "\n" end)
  string(FIND "${${inout}}" "\t" tab)
  math(EXPR length "${end} - ${tab} - 1")
  math(EXPR behind "${tab} + 1")
  math(EXPR next "${end} + 1")
  string(SUBSTRING "${${inout}}" 0 ${tab} text)
  set(${name} "${text}" PARENT_SCOPE)
  string(SUBSTRING "${${inout}}" ${behind} ${length} text)
  set(${directive} "${text}" PARENT_SCOPE)
  string(SUBSTRING "${${inout}}" ${next} -1 text)
  set(${inout} "${text}" PARENT_SCOPE)
endfunction()

# attn_add_broken_steps(<chapter>): tests/broken/STEP.edits contains versions of a step with one
# changed place (edit.awk). The title of a version is the report it must cause (broken_step.cpp).
# Adds a test per version, and one for the unchanged step. CMake stops if a place is not found: the
# step has changed. Versions that would show the answer of an exercise are in
# exercises/STEP.solution.edits, which the student edition lacks.
function(attn_add_broken_steps chapter)
  file(GLOB files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/broken/*.edits)
  file(GLOB solutions CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/exercises/*.solution.edits)
  foreach(solution ${solutions})
    get_filename_component(step ${solution} NAME_WE)
    if(NOT EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/tests/broken/${step}.edits)
      message(FATAL_ERROR "${solution}: there is no tests/broken/${step}.edits")
    endif()
  endforeach()
  foreach(edits ${files})
    get_filename_component(step ${edits} NAME_WE)
    set(solution ${CMAKE_CURRENT_SOURCE_DIR}/exercises/${step}.solution.edits)
    if(EXISTS ${solution})
      list(APPEND edits ${solution})
    endif()
    attn_broken_step(${chapter} ${step} ${edits})
  endforeach()
endfunction()

function(attn_broken_step chapter step)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/broken/${step})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${step}.cu)
  attn_read(text ${CMAKE_CURRENT_SOURCE_DIR}/${step}.cu)
  attn_inline_headers(text)
  file(CONFIGURE OUTPUT ${folder}/text/0 CONTENT "@text@" @ONLY)
  attn_edited(edited ${folder}/text "" 1 ${folder}/text/0 ${ARGN})
  set(includes)
  set(rows)
  set(table)
  set(target broken_${step})
  set(edited "0\t\n${edited}")
  while(edited)
    attn_next_row(edited number reason)
    attn_read(text ${folder}/text/${number})
    attn_step_copy(${folder}/${number}.cu ${step} ${step}_${number} "${text}")
    string(APPEND includes "#include \"broken/${step}/${number}.cu\"\n")
    # A decode step has its own prepare function.
    set(prepare nullptr)
    if(step MATCHES "^d[0-9]")
      set(prepare "::emulated::${step}_${number}::prepare")
    endif()
    string(APPEND rows "    {attn::LaunchFunction{::emulated::${step}_${number}::launch},
     \"${reason}\", ${prepare}},\n")
    if(number EQUAL 0)
      set(reason unchanged)
    endif()
    add_test(NAME "broken: ${step} ${number}: ${reason}" COMMAND ${target} ${number})
    set_tests_properties("broken: ${step} ${number}: ${reason}" PROPERTIES LABELS "cpu;broken" TIMEOUT 300)
  endwhile()
  file(CONFIGURE OUTPUT ${folder}/versions.cpp @ONLY CONTENT "// Generated by AttnChapter.cmake.
#include \"tests/broken_step.h\"

@includes@
const char* const attn::tests::kFolder = \"${folder}/\";
const char* const attn::tests::kStep = \"${step}\";
const std::vector<attn::tests::Version> attn::tests::kVersions{
@rows@};
")
  if(NOT TARGET attn_broken_step)
    add_library(attn_broken_step OBJECT ${PROJECT_SOURCE_DIR}/common/tests/broken_step.cpp)
    target_include_directories(attn_broken_step PRIVATE ${PROJECT_SOURCE_DIR}/common)
    target_link_libraries(attn_broken_step PRIVATE attn attn_warnings)
  endif()
  # Workspaces, plans and expected outputs come from the chapter's table.
  if(step MATCHES "^[dfqs]")
    set(table $<TARGET_OBJECTS:${chapter}_table>)
  elseif(chapter MATCHES "^07_" OR step MATCHES "^b[0-9]")  # and kernels that prepare
    set(table $<TARGET_OBJECTS:${chapter}_table> $<TARGET_OBJECTS:${chapter}_emulated>)
  endif()
  # All versions launch the shipped attention kernel; broken versions of that kernel belong to the
  # step that contains it. The parameter types of `attend` are outside the back ends' namespaces,
  # since attn_step_copy renames what is inside.
  attn_attention_of(launched ${CMAKE_CURRENT_SOURCE_DIR}/${step}.cu)
  if(launched)
    set(kernels ${chapter}_emulated)
    if(launched IN_LIST ${chapter}_HOPPER_STEPS)
      set(kernels ${chapter}_hopper_emulated)
    endif()
    list(APPEND table $<TARGET_OBJECTS:${kernels}>)
  endif()
  add_executable(${target} ${folder}/versions.cpp $<TARGET_OBJECTS:attn_broken_step> ${table})
  attn_emulated(${target})
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_CURRENT_BINARY_DIR}
                             ${PROJECT_SOURCE_DIR}/common)
  target_link_libraries(${target} PRIVATE attn)
endfunction()

# attn_add_diff(<target> <from> <to>): prints the difference; a difference is not a failure.
function(attn_add_diff target from to)
  add_custom_target(${target}
    COMMAND git --no-pager diff --no-index --ignore-all-space --function-context ${from} ${to} || true
    VERBATIM USES_TERMINAL)
endfunction()
