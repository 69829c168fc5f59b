# Runs PROGRAM, a judge or a quiz. Right, wrong, and a file that cannot be read are verdicts, and
# the target succeeds: a build tool would put its own words around them. For scripts, start.sh
# exercise and the program itself exit with 1 or 2.
execute_process(COMMAND ${PROGRAM} RESULT_VARIABLE status)
if(NOT status MATCHES "^[012]$")
  message(FATAL_ERROR "no verdict: status ${status}")
endif()
