# Writes the student edition: no solutions, no planted wrong answers.
#
#   cmake -P common/cmake/student_edition.cmake OUT
#
# OUT must not exist or be empty. In every step the region of an exercise is replaced by an #include
# of the student's file, exercises/student/ex01a.inc, which begins as the stub: solving an exercise
# repairs the chapter. If a step has two exercises, each is built with the correct version of the
# other, which is in exercises/ex03b.region. Where another file repeats an answer, it is replaced by
# an #include (hide_answers.awk, AttnHidden.cmake). exercises/<letter>.hidden.txt lists further
# answers: lines "<file> <marker>". Build folders, tests of the grader and the page for instructors
# are left out.
cmake_minimum_required(VERSION 3.22)
get_filename_component(root ${CMAKE_CURRENT_LIST_DIR}/../.. ABSOLUTE)
math(EXPR last "${CMAKE_ARGC} - 1")
set(out "${CMAKE_ARGV${last}}")
if(CMAKE_ARGC LESS 4 OR out MATCHES "student_edition\\.cmake$")
  message(FATAL_ERROR "usage: cmake -P common/cmake/student_edition.cmake OUT")
endif()
get_filename_component(out ${out} ABSOLUTE)
file(GLOB present ${out}/*)
if(present)
  message(FATAL_ERROR "${out}: is not empty")
endif()

file(GLOB tops ${root}/*)
foreach(top ${tops})
  get_filename_component(name ${top} NAME)
  # Excludes .git: its history contains every solution.
  if(NOT name STREQUAL build AND NOT name MATCHES "^\\.")
    file(COPY ${top} DESTINATION ${out}
         PATTERN student EXCLUDE
         PATTERN "*.region" EXCLUDE
         PATTERN "*.mutants" EXCLUDE
         PATTERN "*.solution.*" EXCLUDE
         PATTERN "*.hidden.txt" EXCLUDE
         PATTERN "common/tests/grade" EXCLUDE)
  endif()
endforeach()
foreach(name .clang-format .clangd .devcontainer .vscode)
  file(COPY ${root}/${name} DESTINATION ${out})
endforeach()
file(WRITE ${out}/docs/instructors.md "# For instructors

This page is in the instructor's copy of the suite. Students begin at [their own page](students.md).
")
# Students commit their files; in this repository they are ignored.
file(READ ${root}/.gitignore ignored)
string(REPLACE "/0*/exercises/student/\n" "" ignored "${ignored}")
file(WRITE ${out}/.gitignore "${ignored}")

include(${root}/common/cmake/AttnHidden.cmake)
find_program(awk NAMES awk gawk mawk REQUIRED)
set(work ${out}/.work)
file(MAKE_DIRECTORY ${work}/answers ${work}/hidden)

# attn_encode(<out> <file>): encodes for attn_decode of AttnHidden.cmake.
function(attn_encode out file)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env LC_ALL=C ${awk} -f ${root}/common/cmake/encode.awk ${file}
    OUTPUT_FILE ${out} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(GLOB chapters ${out}/0*)
foreach(chapter ${chapters})
  get_filename_component(chapter_name ${chapter} NAME)
  string(SUBSTRING ${chapter_name} 0 2 number)
  file(GLOB stubs ${chapter}/exercises/*.stub.inc)
  foreach(stub ${stubs})
    get_filename_component(letter ${stub} NAME)
    string(REGEX REPLACE "\\.stub\\.inc$" "" letter ${letter})
    set(exercise ex${number}${letter})
    file(COPY_FILE ${stub} ${chapter}/exercises/student_${exercise}.tmp)
    file(MAKE_DIRECTORY ${chapter}/exercises/student)
    file(RENAME ${chapter}/exercises/student_${exercise}.tmp
                ${chapter}/exercises/student/${exercise}.inc)
    file(GLOB steps ${chapter}/*.cu ${chapter}/kernels/*.h)
    set(marker "//! [${exercise}]")
    string(LENGTH "${marker}" length)
    foreach(step ${steps})
      file(READ ${step} text)
      string(FIND "${text}" "${marker}" begin)
      if(begin EQUAL -1)
        continue()
      endif()
      string(FIND "${text}" "${marker}" end REVERSE)
      math(EXPR after "${begin} + ${length}")
      math(EXPR size "${end} - ${after}")
      string(SUBSTRING "${text}" 0 ${after} before)
      string(SUBSTRING "${text}" ${after} ${size} region)
      string(SUBSTRING "${text}" ${end} -1 rest)
      file(WRITE ${work}/answers/${exercise} "${region}")
      string(REGEX MATCHALL "//! \\[ex[0-9]+[a-z]\\]" others "${text}")
      list(REMOVE_DUPLICATES others)
      list(LENGTH others count)
      if(count GREATER 1)
        attn_encode(${chapter}/exercises/${exercise}.region ${work}/answers/${exercise})
      endif()
      file(WRITE ${step} "${before}\n#include \"exercises/student/${exercise}.inc\"\n${rest}")
    endforeach()
  endforeach()
  file(GLOB solutions ${root}/${chapter_name}/exercises/*.solution.txt)
  foreach(solution ${solutions})
    get_filename_component(letter ${solution} NAME_WE)
    attn_quiz_stub(${chapter}/exercises/${letter}.stub.txt ex${number}${letter} ${solution})
  endforeach()
  file(GLOB more ${root}/${chapter_name}/exercises/*.hidden.txt)
  foreach(list ${more})
    get_filename_component(letter ${list} NAME_WE)
    file(STRINGS ${list} pairs REGEX "^[^#]")
    foreach(pair ${pairs})
      separate_arguments(pair)
      list(GET pair 0 file)
      list(GET pair 1 marker)
      file(READ ${chapter}/${file} text)
      if(NOT text MATCHES "//! \\[${marker}\\]\n(.*)//! \\[${marker}\\]")
        message(FATAL_ERROR "${list}: ${file} has no pair of //! [${marker}]")
      endif()
      file(WRITE ${work}/answers/ex${number}${letter}_${marker} "${CMAKE_MATCH_1}")
    endforeach()
  endforeach()
endforeach()

# Broken versions of steps that would show an answer.
file(GLOB lists ${out}/0*/tests/broken/*.edits)
foreach(list ${lists})
  file(READ ${list} text)
  string(FIND "${text}" "\n#! [answers]" begin)
  if(NOT begin EQUAL -1)
    string(SUBSTRING "${text}" 0 ${begin} text)
    file(WRITE ${list} "${text}")
  endif()
endforeach()

# The same text in other files.
file(GLOB answers ${work}/answers/*)
file(GLOB given ${out}/0*/exercises/*.stub.inc)
file(GLOB quizzes ${root}/0*/exercises/*.solution.txt)
file(GLOB_RECURSE texts ${out}/*)
list(FILTER texts EXCLUDE REGEX "/\\.work/|/exercises/(student/|[a-z]\\.stub)|\\.(npy|region)$")
execute_process(
  COMMAND ${CMAKE_COMMAND} -E env LC_ALL=C
          ${awk} -v out=${work}/hidden -f ${root}/common/cmake/hide_answers.awk
          kind=answer ${answers} kind=given ${given} kind=quiz ${quizzes} kind=text ${texts}
  COMMAND_ERROR_IS_FATAL ANY)
foreach(text ${texts})
  if(EXISTS ${text}.hidden)
    file(RENAME ${text}.hidden ${text})
  endif()
endforeach()
file(MAKE_DIRECTORY ${out}/common/hidden)
file(GLOB hidden RELATIVE ${work}/hidden ${work}/hidden/*)
foreach(name ${hidden})
  attn_encode(${out}/common/hidden/${name} ${work}/hidden/${name})
endforeach()
file(REMOVE_RECURSE ${work})

# Tests of answers, between two //! [answers], are skipped, and counted.
file(GLOB tests ${out}/0*/tests/test*.cpp)
foreach(test ${tests})
  file(READ ${test} text)
  set(marker "//! [answers]\n")
  string(FIND "${text}" "${marker}" begin)
  if(NOT begin EQUAL -1)
    string(FIND "${text}" "${marker}" end REVERSE)
    string(SUBSTRING "${text}" 0 ${begin} before)
    string(SUBSTRING "${text}" ${end} -1 rest)
    string(REPLACE "${marker}" "" rest "${rest}")
    file(WRITE ${test} "${before}ATTN_SKIP(\"the edition for students has no answers\");\n${rest}")
  endif()
endforeach()

# Its steps are not the measured ones, so the evidence is not checked there.
file(WRITE ${out}/.student_edition "made by common/cmake/student_edition.cmake\n")
message("student edition: ${out}")
