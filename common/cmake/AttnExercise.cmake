# Exercises: copies of a step file with its region //! [ex01a] replaced.

# The folder of the students' files; grade.sh sets it. Empty: exercises/student of a chapter.
set(ATTN_STUDENT_DIR "" CACHE PATH "folder of the students' files")
find_program(ATTN_BASH bash)
mark_as_advanced(ATTN_BASH)

# attn_region(<out before> <out after> <text> <exercise>): <text> before the first marker //!
# [ex01a], and after the second. <out before> is empty if there is no such pair.
function(attn_region out_before out_after text exercise)
  set(marker "//! [${exercise}]")
  string(LENGTH "${marker}" length)
  string(FIND "${text}" "${marker}" begin)
  string(FIND "${text}" "${marker}" end REVERSE)
  set(before)
  set(after)
  if(NOT begin EQUAL end)
    string(SUBSTRING "${text}" 0 ${begin} before)
    math(EXPR end "${end} + ${length}")
    string(SUBSTRING "${text}" ${end} -1 after)
  endif()
  set(${out_before} "${before}" PARENT_SCOPE)
  set(${out_after} "${after}" PARENT_SCOPE)
endfunction()

# attn_shipped_regions(<inout text> <folder of exercises> <exercise>): in the student edition the
# region of an exercise is an #include of the student's file. If a step has two regions, the one
# that is not built gets its correct text, which student_edition.cmake left in
# exercises/ex03c.region (AttnHidden.cmake).
function(attn_shipped_regions inout folder exercise)
  set(text "${${inout}}")
  file(GLOB regions ${folder}/*.region)
  foreach(file ${regions})
    get_filename_component(other ${file} NAME_WE)
    attn_region(before after "${text}" ${other})
    if(NOT before OR other STREQUAL exercise)
      continue()
    endif()
    attn_decode(region ${file})
    set(text "${before}//! [${other}]${region}//! [${other}]${after}")
  endforeach()
  set(${inout} "${text}" PARENT_SCOPE)
endfunction()

# attn_line(<out> <text> <file>): a #line directive for the code after <text> in <file>, so that
# messages of compilers and of the emulator name the step's file instead of a generated copy.
function(attn_line out text file)
  string(REGEX REPLACE "[^\n]" "" newlines "${text}")
  string(LENGTH "${newlines}" line)
  math(EXPR line "${line} + 1")
  set(${out} "#line ${line} \"${file}\"\n" PARENT_SCOPE)
endfunction()

# attn_replace_region(<inout text> <out found> <file> <exercise> <inc or "">): replaces the region
# in <text>, of <file>, by an #include of <inc> (kept if empty); found: whether it has one.
function(attn_replace_region inout found file exercise inc)
  set(text "${${inout}}")
  get_filename_component(folder ${file} DIRECTORY)
  string(REGEX REPLACE "/kernels$" "" folder ${folder})
  attn_shipped_regions(text ${folder}/exercises ${exercise})
  attn_region(before rest "${text}" ${exercise})
  if(before AND inc)
    # The rest keeps its line numbers in the file.
    string(LENGTH "${text}" all)
    string(LENGTH "${rest}" length)
    math(EXPR length "${all} - ${length}")
    string(SUBSTRING "${text}" 0 ${length} ahead)
    attn_line(line "${ahead}" ${file})
    set(text "${before}\n#include \"${inc}\"\n${line}${rest}")
  endif()
  set(${found} FALSE PARENT_SCOPE)
  if(before)
    set(${found} TRUE PARENT_SCOPE)
  endif()
  set(${inout} "${text}" PARENT_SCOPE)
endfunction()

# attn_put_header(<inout text> <file> <header> <its text>): replaces the #include of a header in
# <text>, of <file>, by the header's text, if there is one.
function(attn_put_header inout file header header_text)
  set(include "#include \"${header}\"\n")
  string(FIND "${${inout}}" "${include}" at)
  if(at EQUAL -1)
    return()
  endif()
  file(READ ${file} ahead)
  string(FIND "${ahead}" "${include}" end)
  string(SUBSTRING "${ahead}" 0 ${end} ahead)
  attn_line(after "${ahead}\n" ${file})
  get_filename_component(folder ${file} DIRECTORY)
  set(before "#line 1 \"${folder}/${header}\"\n")
  string(REPLACE "${include}" "${before}${header_text}\n${after}" text "${${inout}}")
  set(${inout} "${text}" PARENT_SCOPE)
endfunction()

# attn_exercise_source(<out> <step file> <exercise> <variant> <inc or ""> <probe or "">
#                      [<header> ...]): writes <out>: the step in its own namespace, with the region
# replaced by an #include of <inc> (kept if empty), and <probe> included at the end of the
# namespace. Headers of the chapter are copied into the same namespace instead of being included,
# because the region may be in one of them. A header that another one includes comes first. The
# headers that exercise_filter.sh allows are included in advance, since a region may be inside a
# function. A copy has only the kernels that the cases of exercise.cpp and speed.cpp run: of 16 bits
# only bf16, head dims up to 64.
function(attn_exercise_source out step_file exercise variant inc probe)
  file(READ ${step_file} text)
  get_filename_component(step ${step_file} NAME_WE)
  get_filename_component(folder ${step_file} DIRECTORY)
  attn_replace_region(text found ${step_file} ${exercise} "${inc}")
  string(REPLACE "ATTN_BACKEND::${step}" "ATTN_BACKEND::${step}_${variant}" text "${text}")
  string(REGEX REPLACE "\n *case (128|256): return launch(_attention)?<[^\n]*" "\n" text "${text}")
  if(text MATCHES "dispatch_16bit")
    string(REPLACE "dispatch_16bit(" "dispatch_bf16(" text "${text}")
    string(FIND "${text}" "using namespace attn;\n" at)
    string(SUBSTRING "${text}" 0 ${at} ahead)
    attn_line(line "${ahead}\n" ${step_file})
    string(REPLACE "using namespace attn;\n" "using namespace attn;
template <class Body>
Status dispatch_bf16(DType dtype, Body body) {
  if (dtype != DType::bf16) return Status::unsupported(\"exercises take bf16\");
  return body.template operator()<__nv_bfloat16>();
}
${line}" text "${text}")
  endif()
  string(PREPEND text "#line 1 \"${step_file}\"\n")
  if(probe)
    string(REPLACE "}  // namespace ATTN_BACKEND::${step}_${variant}" "#ifdef ATTN_EMULATED
namespace probed {
#include \"${probe}\"
}
#endif
}  // namespace ATTN_BACKEND::${step}_${variant}" text "${text}")
    string(PREPEND text "#include <stdexcept>\n#include <vector>\n")
  endif()
  set(names)
  foreach(header ${ARGN})
    set(own_file ${folder}/${header})
    file(READ ${own_file} own)
    attn_replace_region(own found_there ${own_file} ${exercise} "${inc}")
    if(found_there)
      set(found TRUE)
    endif()
    string(REPLACE "#pragma once" "" own "${own}")
    string(REGEX REPLACE "namespace ATTN_BACKEND::([a-z_]+) {"
           "namespace ATTN_BACKEND::${step}_${variant} { using namespace \\1;" own "${own}")
    foreach(name ${names})
      attn_put_header(own ${own_file} ${name} "${text_of_${name}}")
    endforeach()
    list(APPEND names ${header})
    set(text_of_${header} "${own}")
  endforeach()
  foreach(name ${names})
    attn_put_header(text ${step_file} ${name} "${text_of_${name}}")
  endforeach()
  if(NOT found)
    message(FATAL_ERROR "${step_file} ${ARGN}: needs a pair of //! [${exercise}]")
  endif()
  foreach(header utility type_traits numeric limits cstdint cmath climits cfloat array algorithm)
    string(PREPEND text "#include <${header}>\n")
  endforeach()
  file(CONFIGURE OUTPUT ${out} CONTENT "${text}" @ONLY)
endfunction()

# attn_exercise_table(<out> <step> <probe> <prepare> <gpu> <variant> ...): the versions in a
# program. <prepare>: a kernel of the chapter, or <step>: each version has its own.
function(attn_exercise_table out step probe prepare gpu)
  set(declarations)
  set(rows)
  foreach(variant ${ARGN})
    set(space ${step}_${variant})
    set(prepare_launch)
    if(prepare)
      set(of ${prepare})
      set(function launch)
      if(prepare STREQUAL step)
        set(of ${space})
        set(function prepare)
      endif()
      foreach(backend gpu emulated)
        string(APPEND declarations
          "namespace ${backend}::${of} {\nattn::Status ${function}(const attn::Arguments&);\n}\n")
      endforeach()
      set(prepare_launch ", {nullptr, emulated::${of}::${function}}")
      if(gpu)
        set(prepare_launch ", {gpu::${of}::${function}, emulated::${of}::${function}}")
      endif()
    endif()
    string(APPEND declarations
      "namespace emulated::${space} {\nattn::Status launch(const attn::Arguments&);\n"
      "namespace probed {\nstd::vector<float> probe();\n}\n}\n"
      "namespace gpu::${space} {\nattn::Status launch(const attn::Arguments&);\n}\n")
    set(gpu_launch nullptr)
    if(gpu)
      set(gpu_launch gpu::${space}::launch)
    endif()
    set(probe_function nullptr)
    if(probe)
      set(probe_function emulated::${space}::probed::probe)
    endif()
    string(APPEND rows
      "      {\"${variant}\", {${gpu_launch}, emulated::${space}::launch}, ${probe_function}"
      "${prepare_launch}},\n")
  endforeach()
  file(CONFIGURE OUTPUT ${out} CONTENT "// Generated by AttnExercise.cmake.
#include \"exercise/child.h\"

${declarations}
const std::vector<attn::Variant>& attn::variants() {
  static const std::vector<Variant> all{
${rows}  };
  return all;
}
" @ONLY)
endfunction()

# attn_exercise_judge(<out> <exercise> <kind> <step> <judge or "">): an exercise's entry in
# judge_01_naive.
function(attn_exercise_judge out exercise kind step judge)
  set(code)
  set(function nullptr)
  if(judge)
    set(function judge)
    set(code "#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include \"exercise/numbers.h\"
#include \"emulator/warp_access.h\"

namespace {
using namespace attn;
#include \"${judge}\"
}
")
  endif()
  file(CONFIGURE OUTPUT ${out} CONTENT "// Generated by AttnExercise.cmake.
#include \"exercise/exercise.h\"
${code}
[[maybe_unused]] static const bool added =
    attn::add_exercise({\"${exercise}\", \"${kind}\", \"${step}\", ${function}});
" @ONLY)
endfunction()

# attn_add_exercise(<chapter> <letter> KIND <fill|index|bughunt> STEP <step> [PREPARE <kernel>]
#                   [TABLE <file> ...] [HEADERS <header> ...]),
# after attn_add_chapter. PREPARE: the kernel that runs once before the step: a file of kernels/ or
# of SHARED, or <step>, whose file has a prepare(). TABLE: the files of host/ whose functions the
# launches call. HEADERS: of the chapter, one of which contains the region
# (attn_exercise_source). Files in exercises/: <letter>.md, <letter>.stub.inc, <letter>.mutants,
# optionally <letter>.probe.inc and <letter>.judge.inc. <letter>.mutants has wrong answers as
# changes of the region (edit.awk). An entry whose name begins with "right" is another correct
# answer, which wrong ones may be based on.
#
#   ex01a        builds and runs the student's file, exercises/student/ex01a.inc
#   ex01a-hint   the next hint
#   ex01a-diff   the student's step compared with the shipped one
#   ctest        correct answers pass; the stub and each wrong one fail with exit status 1
function(attn_add_exercise chapter letter)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "KIND;STEP;PREPARE" "TABLE;HEADERS")
  string(SUBSTRING ${chapter} 0 2 number)
  set(exercise ex${number}${letter})
  set(folder ${CMAKE_CURRENT_SOURCE_DIR}/exercises)
  set(work ${CMAKE_CURRENT_BINARY_DIR}/exercises/${exercise})
  set(step_file ${CMAKE_CURRENT_SOURCE_DIR}/${arg_STEP}.cu)
  set(student ${folder}/student/${exercise}.inc)
  if(ATTN_STUDENT_DIR)
    set(student ${ATTN_STUDENT_DIR}/${exercise}.inc)
  endif()
  if(NOT EXISTS ${student})
    configure_file(${folder}/${letter}.stub.inc ${student} COPYONLY)
  endif()
  set(probe)
  set(judge)
  if(EXISTS ${folder}/${letter}.judge.inc)
    set(probe ${folder}/${letter}.probe.inc)
    set(judge ${folder}/${letter}.judge.inc)
  endif()
  set(prepare)
  if(arg_PREPARE AND NOT arg_PREPARE STREQUAL arg_STEP)
    set(prepare "$<FILTER:${${chapter}_OBJECTS},INCLUDE,/${arg_PREPARE}\\.c>")
  endif()
  foreach(file ${arg_TABLE})
    list(APPEND prepare "$<FILTER:$<TARGET_OBJECTS:${chapter}_table>,INCLUDE,/${file}\\.c>")
  endforeach()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${step_file})
  set(region_file ${step_file})
  foreach(header ${arg_HEADERS})
    set(header_file ${CMAKE_CURRENT_SOURCE_DIR}/${header})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${header_file})
    file(STRINGS ${header_file} markers REGEX "//! \\[${exercise}\\]")
    if(markers)
      set(region_file ${header_file})
    endif()
  endforeach()
  get_filename_component(region_name ${region_file} NAME)
  set(hopper ${${chapter}_HOPPER})
  if(arg_STEP IN_LIST ${chapter}_HOPPER_STEPS)
    set(hopper HOPPER)
  endif()

  attn_exercise_judge(${work}/judge.cpp ${exercise} ${arg_KIND} ${arg_STEP} "${judge}")
  attn_judge_program(${chapter} ${work}/judge.cpp ${arg_STEP})

  # The student's program, for both back ends. The filter checks the text before it is compiled, and
  # the functions that the object calls before it is linked.
  attn_exercise_source(${work}/${exercise}_student.cu ${step_file} ${exercise} student ${student}
                       "${probe}" ${arg_HEADERS})
  attn_exercise_table(${work}/student_table.cpp ${arg_STEP} "${probe}" "${arg_PREPARE}"
                      ${ATTN_HAVE_CUDA} student)
  attn_add_kernels(${exercise}_student_kernels ${hopper} FILES ${work}/${exercise}_student.cu)
  set(filter ${ATTN_BASH} ${PROJECT_SOURCE_DIR}/common/scripts/exercise_filter.sh)
  add_custom_command(OUTPUT ${work}/filtered COMMAND ${filter} text ${exercise} ${student}
    COMMAND ${CMAKE_COMMAND} -E touch ${work}/filtered
    DEPENDS ${student} ${PROJECT_SOURCE_DIR}/common/scripts/exercise_filter.sh
    COMMENT "Reading ${exercise}.inc" VERBATIM)
  set_property(SOURCE ${CMAKE_CURRENT_BINARY_DIR}/emulated/${exercise}_student.cpp ${work}/${exercise}_student.cu
    APPEND PROPERTY OBJECT_DEPENDS ${work}/filtered)
  attn_child_program(${exercise}_student ${work}/student_table.cpp
                     "${${exercise}_student_kernels_OBJECTS};${prepare}")
  # A stub uses few of its variables.
  target_compile_options(${exercise}_student_kernels_emulated PRIVATE -Wno-unused)
  if(ATTN_HAVE_CUDA)
    target_compile_options(${exercise}_student_kernels_gpu PRIVATE
      $<$<COMPILE_LANGUAGE:CUDA>:-diag-suppress=177,550 -Xcompiler=-Wno-unused>)
  endif()
  # Built only with the exercise: `all` includes the checked versions below.
  set_target_properties(${exercise}_student ${exercise}_student_kernels_emulated PROPERTIES EXCLUDE_FROM_ALL ON)
  if(ATTN_HAVE_CUDA)
    set_target_properties(${exercise}_student_kernels_gpu PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
  add_custom_command(TARGET ${exercise}_student PRE_LINK
    COMMAND ${filter} object ${exercise} $<TARGET_OBJECTS:${exercise}_student_kernels_emulated>
    COMMAND_EXPAND_LISTS VERBATIM)
  attn_editor_entry(${exercise} ${student} ${work}/${exercise}_student.cu ${arg_STEP}_student)
  attn_verdict_target(${exercise} $<TARGET_FILE:judge_${chapter}> ${exercise} --speed)
  add_dependencies(${exercise} judge_${chapter} ${exercise}_student)
  attn_hint_target(${exercise} ${folder}/${letter}.md ${work})
  # The student's text in the region, to compare with the shipped file.
  file(MAKE_DIRECTORY ${work}/diff)
  add_custom_target(${exercise}-diff
    COMMAND ${CMAKE_COMMAND} -DSTEP=${region_file} -DEXERCISE=${exercise} -DINC=${student}
            -DOUT=${work}/diff/${region_name} -P ${PROJECT_SOURCE_DIR}/common/cmake/exercise_inline.cmake
    COMMAND git --no-pager diff --no-index --ignore-all-space ${work}/diff/${region_name} ${region_file}
            || true
    COMMENT "${exercise}: your text, and the shipped one" VERBATIM USES_TERMINAL)

  # A student edition has no planted wrong answers, and its shipped step is the student's.
  if(NOT EXISTS ${folder}/${letter}.mutants)
    set_target_properties(${exercise}_student PROPERTIES EXCLUDE_FROM_ALL OFF)
    add_test(NAME "${exercise}: student" COMMAND judge_${chapter} ${exercise})
    set_tests_properties("${exercise}: student" PROPERTIES LABELS "exercise" TIMEOUT 300)
    return()
  endif()

  set(kernels ${PROJECT_SOURCE_DIR}/common/kernels)
  # The checked versions: one program and one compilation for all of them, emulated.
  file(READ ${region_file} text)
  attn_region(before rest "${text}" ${exercise})
  string(LENGTH "${before}" begin)
  string(LENGTH "${text}" length)
  string(LENGTH "${rest}" end)
  math(EXPR length "${length} - ${end} - ${begin}")
  string(SUBSTRING "${text}" ${begin} ${length} region)
  file(CONFIGURE OUTPUT ${work}/region CONTENT "@region@" @ONLY)
  attn_edited(mutants ${work}/mutants .inc 0 ${work}/region ${folder}/${letter}.mutants)
  set(variants)
  set(all)
  set(rows "solution\t\nstub\t\n${mutants}")
  while(rows)
    attn_next_row(rows variant directive)
    set(inc ${work}/mutants/${variant}.inc)
    set(label mutant)
    set(status 1)
    # For "race: A | B" both source lines are reported; for "says: TEXT" the judge reports the text.
    set(said)
    if(variant MATCHES "^right|^solution$")
      set(label solution)
      set(status 0)
    elseif(variant STREQUAL stub)
      set(inc ${folder}/${letter}.stub.inc)
      set(said -DSTUB=ON)  # a bughunt: the student must find its race, so no line is named
    elseif(directive MATCHES "^race: ")
      set(said -DRACE=${inc})
    elseif(directive MATCHES "^says: (.*)")
      set(said "-DSAYS=${CMAKE_MATCH_1}")
    endif()
    if(variant STREQUAL solution)
      set(inc)
    endif()
    list(APPEND variants ${variant})
    attn_exercise_source(${work}/${variant}.cu ${step_file} ${exercise} ${variant} "${inc}" "${probe}"
                         ${arg_HEADERS})
    string(APPEND all "#include \"${work}/${variant}.cu\"\n")
    add_test(NAME "${exercise}: ${variant}" COMMAND ${CMAKE_COMMAND}
      "-DPROGRAM=$<TARGET_FILE:judge_${chapter}>;${exercise};--program;$<TARGET_FILE:check_${exercise}>;--variant;${variant}"
      -DSTATUS=${status} ${said}
      "-DFOLDERS=${work};${work}/..;${CMAKE_CURRENT_SOURCE_DIR};${PROJECT_SOURCE_DIR};${kernels}"
      -P ${PROJECT_SOURCE_DIR}/common/cmake/expect_exit.cmake)
    set_tests_properties("${exercise}: ${variant}" PROPERTIES LABELS "exercise;${label}" TIMEOUT 300)
  endwhile()
  file(CONFIGURE OUTPUT ${work}/variants.cpp CONTENT "${all}" @ONLY)
  attn_exercise_table(${work}/variants_table.cpp ${arg_STEP} "${probe}" "${arg_PREPARE}" 0
                      ${variants})
  add_library(${exercise}_variants OBJECT ${work}/variants.cpp)
  attn_emulated(${exercise}_variants)
  target_compile_options(${exercise}_variants PRIVATE -Wno-unused)
  target_include_directories(${exercise}_variants PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_link_libraries(${exercise}_variants PRIVATE attn)
  # A student's text may call the functions that the shipped text and the stub call.
  add_test(NAME "${exercise}: its object passes the filter" COMMAND ${filter} object ${exercise}
           $<TARGET_OBJECTS:${exercise}_variants> COMMAND_EXPAND_LISTS)
  set_tests_properties("${exercise}: its object passes the filter" PROPERTIES LABELS "exercise")
  attn_child_program(check_${exercise} ${work}/variants_table.cpp
                     "$<TARGET_OBJECTS:${exercise}_variants>;${prepare}")
endfunction()

# attn_editor_entry(<exercise> <student's file> <student's step> <namespace>): adds the student's
# file to compile_commands.json, so that editors know the names of the step in it. Never built.
function(attn_editor_entry exercise student step namespace)
  get_filename_component(folder ${step} DIRECTORY)
  file(CONFIGURE OUTPUT ${folder}/editor.h @ONLY CONTENT
       "#include \"@step@\"\nusing namespace ATTN_BACKEND::@namespace@;\n")
  set_source_files_properties(${student} PROPERTIES LANGUAGE CXX)
  add_library(${exercise}_editor OBJECT EXCLUDE_FROM_ALL ${student})
  attn_emulated(${exercise}_editor)
  target_compile_options(${exercise}_editor PRIVATE "SHELL:-include \"${folder}/editor.h\"")
  target_include_directories(${exercise}_editor PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_link_libraries(${exercise}_editor PRIVATE attn_device)
endfunction()

# attn_judge_program(<chapter> <exercise's judge.cpp> <step>): judge_01_naive, with an additional
# exercise. It contains the steps that exercises are based on, which the student's version is timed
# against.
function(attn_judge_program chapter judge step)
  set(sources ${PROJECT_SOURCE_DIR}/common/exercise)
  if(NOT TARGET attn_judge)  # main() and the functions it calls, compiled once for all chapters
    add_library(attn_judge OBJECT ${sources}/judge_main.cpp ${sources}/exercise.cpp ${sources}/speed.cpp
                                  ${sources}/pipe.cpp)
    target_compile_options(attn_judge PRIVATE $<$<CONFIG:Release>:-O1>)
    target_link_libraries(attn_judge PRIVATE attn attn_warnings CLI11::CLI11)
  endif()
  if(NOT TARGET judge_${chapter})
    add_executable(judge_${chapter} $<TARGET_OBJECTS:attn_judge> $<TARGET_OBJECTS:${chapter}_table>)
    target_link_libraries(judge_${chapter} PRIVATE attn attn_warnings CLI11::CLI11)
  endif()
  target_sources(judge_${chapter} PRIVATE ${judge})
  get_target_property(steps judge_${chapter} ATTN_STEPS)
  if(ATTN_TOGETHER GREATER 1)
    if(NOT steps)  # each object has several
      set_property(TARGET judge_${chapter} PROPERTY ATTN_STEPS all)
      target_sources(judge_${chapter} PRIVATE "${${chapter}_OBJECTS}")
    endif()
  elseif(NOT step IN_LIST steps)
    set_property(TARGET judge_${chapter} APPEND PROPERTY ATTN_STEPS ${step})
    target_sources(judge_${chapter} PRIVATE "$<FILTER:${${chapter}_OBJECTS},INCLUDE,/${step}\\.c>")
  endif()
endfunction()

# attn_child_program(<name> <table> <objects>): the kernels of an exercise only.
function(attn_child_program name table objects)
  set(sources ${PROJECT_SOURCE_DIR}/common/exercise)
  if(NOT TARGET attn_child)
    add_library(attn_child OBJECT ${sources}/child.cpp ${sources}/pipe.cpp)
    target_compile_options(attn_child PRIVATE $<$<CONFIG:Release>:-O1>)
    target_link_libraries(attn_child PRIVATE attn attn_warnings)
  endif()
  add_executable(${name} $<TARGET_OBJECTS:attn_child> ${table} ${objects})
  target_link_libraries(${name} PRIVATE attn attn_warnings)
endfunction()

# attn_hint_target(<exercise> <page> <folder>): the target ex01a-hint; the folder stores the number
# of hints shown.
function(attn_hint_target exercise page folder)
  add_custom_target(${exercise}-hint
    COMMAND ${CMAKE_COMMAND} -DPAGE=${page} -DSTATE=${folder}/hints
            -P ${PROJECT_SOURCE_DIR}/common/cmake/next_hint.cmake
    COMMENT "${exercise}: the next hint" USES_TERMINAL VERBATIM)
endfunction()

# attn_verdict_target(<exercise> <program> <argument> ...): the target that runs a judge or a quiz.
function(attn_verdict_target exercise)
  add_custom_target(${exercise}
    COMMAND ${CMAKE_COMMAND} "-DPROGRAM=${ARGN}" -P ${PROJECT_SOURCE_DIR}/common/cmake/verdict.cmake
    COMMENT "${exercise}: the verdict" USES_TERMINAL VERBATIM)
endfunction()

# attn_add_quiz(<chapter> <letter> KIND <detective|look|predict>): a quiz. Files in exercises/:
# <letter>.md, <letter>.solution.txt, <letter>.mutants, and <letter>.key or <letter>.task. The
# student's file is exercises/student/ex01d.txt; targets and tests as above.
function(attn_add_quiz chapter letter)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "KIND" "")
  string(SUBSTRING ${chapter} 0 2 number)
  set(exercise ex${number}${letter})
  set(folder ${CMAKE_CURRENT_SOURCE_DIR}/exercises)
  set(work ${CMAKE_CURRENT_BINARY_DIR}/exercises/${exercise})
  file(MAKE_DIRECTORY ${work})
  set(student ${folder}/student/${exercise}.txt)
  if(ATTN_STUDENT_DIR)
    set(student ${ATTN_STUDENT_DIR}/${exercise}.txt)
  endif()
  set(stub_file ${folder}/${letter}.stub.txt)  # of a student edition, which has no solution
  if(NOT EXISTS ${stub_file})
    set(stub_file ${work}/stub.txt)
    attn_quiz_stub(${stub_file} ${exercise} ${folder}/${letter}.solution.txt)
  endif()
  if(NOT EXISTS ${student})
    configure_file(${stub_file} ${student} COPYONLY)
  endif()
  if(NOT TARGET attn_quiz)  # one for all chapters
    add_library(attn_quiz OBJECT ${PROJECT_SOURCE_DIR}/common/exercise/quiz_main.cpp
                                 ${PROJECT_SOURCE_DIR}/common/exercise/quiz_answers.cpp)
    target_compile_options(attn_quiz PRIVATE $<$<CONFIG:Release>:-O1>)
    target_link_libraries(attn_quiz PRIVATE attn attn_warnings CLI11::CLI11)
  endif()
  if(NOT TARGET quiz_${chapter})
    # Emulated steps: only their tiles are queried.
    add_executable(quiz_${chapter} $<TARGET_OBJECTS:attn_quiz> $<TARGET_OBJECTS:${chapter}_table>
                                   $<TARGET_OBJECTS:${chapter}_emulated>)
    target_link_libraries(quiz_${chapter} PRIVATE attn attn_warnings CLI11::CLI11)
  endif()
  if(arg_KIND MATCHES "^(detective|look)$")
    set(judge --key ${folder}/${letter}.key)
    set(seal)
  else()
    set(judge --task ${folder}/${letter}.task)
    set(seal --seal ${work}/sealed.txt)
  endif()
  attn_verdict_target(${exercise} $<TARGET_FILE:quiz_${chapter}> --answers ${student} ${judge}
                      ${seal})
  add_dependencies(${exercise} quiz_${chapter})
  attn_hint_target(${exercise} ${folder}/${letter}.md ${work})
  set(rows "stub\t\n")
  if(EXISTS ${folder}/${letter}.mutants)
    attn_edited(mutants ${work}/mutants .txt 0 ${folder}/${letter}.solution.txt ${folder}/${letter}.mutants)
    string(APPEND rows "solution\t\n${mutants}")
  endif()
  while(rows)
    attn_next_row(rows variant directive)
    set(answers ${work}/mutants/${variant}.txt)
    set(label mutant)
    set(status 1)
    if(variant STREQUAL stub)
      set(answers ${stub_file})
    elseif(variant STREQUAL solution)
      set(answers ${folder}/${letter}.solution.txt)
      set(label solution)
      set(status 0)
    endif()
    add_test(NAME "${exercise}: ${variant}" COMMAND ${CMAKE_COMMAND}
      "-DPROGRAM=$<TARGET_FILE:quiz_${chapter}>;--answers;${answers};${judge}" -DSTATUS=${status}
      -P ${PROJECT_SOURCE_DIR}/common/cmake/expect_exit.cmake)
    set_tests_properties("${exercise}: ${variant}" PROPERTIES LABELS "exercise;${label}" TIMEOUT 60)
  endwhile()
endfunction()
