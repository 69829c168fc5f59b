# Runs PROGRAM (a command and its arguments) and demands the exit status STATUS exactly: a crash is no
# verdict. With RACE, a mutant's file, it also has to report that race, with both lines (race_lines.sh).
execute_process(COMMAND ${PROGRAM} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
message("${output}")
if(NOT result STREQUAL STATUS)
  message(FATAL_ERROR "exit status ${result}, must be ${STATUS}")
endif()
if(NOT RACE)
  if(STATUS EQUAL 1 AND NOT STUB AND output MATCHES "race: [^\n]*")
    message(FATAL_ERROR "a race, and the file does not begin with its two lines, '// race: A | B': ${CMAKE_MATCH_0}")
  endif()
  return()
endif()

if(NOT output MATCHES "race: [^\n]* at ([^ \n]+:[0-9]+) and then [^\n]* at ([^ \n]+:[0-9]+) ")
  message(FATAL_ERROR "reports no race")
endif()
execute_process(COMMAND ${CMAKE_CURRENT_LIST_DIR}/../tests/race_lines.sh "${RACE}" ${CMAKE_MATCH_1} ${CMAKE_MATCH_2} ${FOLDERS}
                RESULT_VARIABLE result OUTPUT_VARIABLE lines ERROR_VARIABLE lines)
message("${lines}")
if(NOT result EQUAL 0)
  message(FATAL_ERROR "not the race that ${RACE} names")
endif()
