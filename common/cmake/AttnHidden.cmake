# Answers hidden in the student edition (student_edition.cmake): text as the decimal codes of its
# bytes, so that it is not read by accident. In other editions nothing is hidden, and this file has
# no effect.

# attn_decode(<out> <file>): the decoded text.
function(attn_decode out file)
  file(READ ${file} codes)
  separate_arguments(codes)
  string(ASCII ${codes} text)
  set(${out} "${text}" PARENT_SCOPE)
endfunction()

# attn_read(<out> <file>): the text of a source with hidden parts restored, for texts that are
# changed before they are compiled.
function(attn_read out file)
  file(READ ${file} text)
  while(text MATCHES "#include \"(hidden/[a-z0-9_]+\\.inc)\"\n")
    file(READ ${PROJECT_BINARY_DIR}/${CMAKE_MATCH_1} hidden)
    string(REPLACE "${CMAKE_MATCH_0}" "${hidden}" text "${text}")
  endwhile()
  set(${out} "${text}" PARENT_SCOPE)
endfunction()

# attn_quiz_stub(<out> <exercise> <solution>): writes the file that a student fills in, the names of
# the solution without its values.
function(attn_quiz_stub out exercise solution)
  file(READ ${solution} text)
  string(REGEX REPLACE " = [^\n]*" " = ?" text "${text}")
  string(REGEX MATCH "[a-z]$" letter ${exercise})
  file(CONFIGURE OUTPUT ${out} @ONLY CONTENT
       "# TODO (@exercise@): answer each question of exercises/@letter@.md.\n@text@")
endfunction()

# For compilers: #include "hidden/ex01a_1.inc". A script (student_edition.cmake) has no project.
set(hidden)
if(PROJECT_SOURCE_DIR)
  file(GLOB hidden ${PROJECT_SOURCE_DIR}/common/hidden/*)
endif()
foreach(file ${hidden})
  get_filename_component(name ${file} NAME)
  attn_decode(text ${file})
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/hidden/${name}.inc CONTENT "@text@" @ONLY)
endforeach()
if(hidden AND NOT CMAKE_SCRIPT_MODE_FILE)
  include_directories(${PROJECT_BINARY_DIR})
endif()
