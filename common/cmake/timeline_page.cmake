# Writes OUT, a C++ file with the page of --timeline: page.html of the folder PAGE with its styles
# and scripts inside, in two parts, between which a run writes its data.
file(READ ${PAGE}/page.html page)
file(READ ${PAGE}/style.css style)
set(script "")
foreach(name data draw page memory memory_draw memory_panel)
  file(READ ${PAGE}/${name}.js text)
  # once is enough
  string(REPLACE "'use strict';\n" "" text "${text}")
  string(APPEND script "${text}")
endforeach()
string(REPLACE "@STYLE@" "${style}" page "${page}")
string(REPLACE "@SCRIPT@" "'use strict';\n${script}" page "${page}")
string(FIND "${page}" "@DATA@" at)
string(LENGTH "@DATA@" length)
math(EXPR rest "${at} + ${length}")
string(SUBSTRING "${page}" 0 ${at} before)
string(SUBSTRING "${page}" ${rest} -1 after)
file(WRITE ${OUT} "// Written by common/cmake/timeline_page.cmake.
#include \"run/timeline_page.h\"

namespace attn {
const std::string_view kTimelinePageBegin = R\"page(${before})page\";
const std::string_view kTimelinePageEnd = R\"page(${after})page\";
}  // namespace attn
")
