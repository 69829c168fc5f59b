# Writes the edition that students get: no solutions, no planted wrong answers.
#
#   cmake -P common/cmake/student_edition.cmake OUT
#
# OUT must not exist or be empty. In every step the region of an exercise becomes an #include of the
# student's file, exercises/student/ex01a.inc, which begins as the stub: solving an exercise mends the
# chapter. Where a step has two exercises, each is built beside the right version of the other, which lies in
# exercises/ex03b.region in hexadecimal (AttnExercise.cmake). Build folders stay behind.
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
  # Not .git: its history holds every solution.
  if(NOT name STREQUAL build AND NOT name MATCHES "^\\.")
    file(COPY ${top} DESTINATION ${out}
         PATTERN student EXCLUDE
         PATTERN "*.region" EXCLUDE
         PATTERN "*.mutant.*" EXCLUDE
         PATTERN "*.solution.*" EXCLUDE)
  endif()
endforeach()
foreach(name .clang-format .clangd .devcontainer .vscode)
  file(COPY ${root}/${name} DESTINATION ${out})
endforeach()
# The students' files are theirs to commit, where ours are not.
file(READ ${root}/.gitignore ignored)
string(REPLACE "/0*/exercises/student/\n" "" ignored "${ignored}")
file(WRITE ${out}/.gitignore "${ignored}")

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
    file(GLOB steps ${chapter}/*.cu ${chapter}/*.h)
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
      string(SUBSTRING "${text}" 0 ${after} before)
      string(SUBSTRING "${text}" ${end} -1 rest)
      string(REGEX MATCHALL "//! \\[ex[0-9]+[a-z]\\]" others "${text}")
      list(REMOVE_DUPLICATES others)
      list(LENGTH others count)
      if(count GREATER 1)
        math(EXPR size "${end} - ${after}")
        string(SUBSTRING "${text}" ${after} ${size} region)
        string(HEX "${region}" region)
        file(WRITE ${chapter}/exercises/${exercise}.region "${region}\n")
      endif()
      file(WRITE ${step} "${before}\n#include \"exercises/student/${exercise}.inc\"\n${rest}")
    endforeach()
  endforeach()
endforeach()
# Its steps are not those that were measured: the evidence is not checked there.
file(WRITE ${out}/.student_edition "made by common/cmake/student_edition.cmake\n")
message("student edition: ${out}")
