# Runs PROGRAM (a command and its arguments) and demands the exit status STATUS exactly: a crash is no
# verdict.
execute_process(COMMAND ${PROGRAM} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
message("${output}")
if(NOT result STREQUAL STATUS)
  message(FATAL_ERROR "exit status ${result}, must be ${STATUS}")
endif()
