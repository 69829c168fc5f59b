# Runs PROGRAM (a command and its arguments) and demands the exit status STATUS exactly: a crash is no
# verdict. With RACE it also has to report a race, with both places.
execute_process(COMMAND ${PROGRAM} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
message("${output}")
if(NOT result STREQUAL STATUS)
  message(FATAL_ERROR "exit status ${result}, must be ${STATUS}")
endif()
if(NOT RACE)
  return()
endif()

if(NOT output MATCHES "race: [^\n]* at ([^ \n]+):([0-9]+) and then [^\n]* at ([^ \n]+):([0-9]+) ")
  message(FATAL_ERROR "reports no race")
endif()
