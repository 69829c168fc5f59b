# Runs PROGRAM, a judge or a quiz. The target succeeds for every verdict: right, wrong, unreadable
# file. Otherwise the build tool would add its own error messages. For scripts, start.sh exercise
# and the program itself exit with 1 or 2.
execute_process(COMMAND ${PROGRAM} RESULT_VARIABLE status)
if(NOT status MATCHES "^[012]$")
  message(FATAL_ERROR "no verdict: status ${status}")
endif()
