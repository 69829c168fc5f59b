// Code in pages: the text between the markers of a source, and refusals.
#include <filesystem>
#include <fstream>
#include <string>

#include "attn/error.h"
#include "report/fences.h"
#include "report/test_files.h"
#include "tests/catch.h"

namespace {

namespace fs = std::filesystem;
using namespace attn;
using namespace attn::report;

struct Folder {
  test::TemporaryFile own;
  fs::path path = own.path().parent_path();
  Folder() {
    write("a.cu",
          "int x;\n  //! [one]\n  int a;\n  //! [inner]\n    int b;\n  //! [inner]\n"
          "  int c;\n  //! [one]\n");
    write("b.cu", "//! [one]\n  int a;\n    int new_b;\n  int c;\n//! [one]\n");
    write("loop.cu",
          "//! [loop]\n#pragma unroll\n    for (;;) {\n#pragma unroll\n      a();\n    }\n"
          "//! [loop]\n");
    write("marks.cu",
          "//! [marks]\n  ATTN_SPAN(\"a\")\n  a();\n  ATTN_SPAN_END(\"a\")\n  b();\n//! [marks]\n");
    std::string many = "//! [many]\n";
    for (int n = 1; n <= 20; ++n) many += "line" + std::to_string(n) + ";\n";
    write("many.cu", many + "//! [many]\n");
  }
  void write(const char* name, const std::string& text) const {
    std::ofstream(path / name) << text;
  }
  std::string fill(const std::string& marker) const {
    try {
      return fill_fences("# Page\n\n<!-- " + marker + " -->\nold\n<!-- end code -->\nrest\n",
                         path / "page.md");
    } catch (const InputError& e) {
      const std::string said = e.what();
      return said.substr(said.find("page.md: ") + 9);
    }
  }
};

}  // namespace

TEST_CASE("a fence has the lines of its region, moved to the left, and a link to them",
          "[fences]") {
  const Folder f;
  CHECK(f.fill("code: a.cu one") ==
        "# Page\n\n<!-- code: a.cu one -->\n[a.cu, lines 3 to 7](a.cu#L3-L7)\n```cpp\nint a;\n"
        "  int b;\nint c;\n```\n<!-- end code -->\nrest\n");
  CHECK(f.fill("code: many.cu many 3-4").find("(many.cu#L4-L5)\n```cpp\nline3;\nline4;\n```\n") !=
        std::string::npos);
  const std::string loop = "#pragma unroll\nfor (;;) {\n#pragma unroll\n  a();\n}\n";
  CHECK(f.fill("code: loop.cu loop").find(loop) != std::string::npos);
  // Marks of timelines are left out, and do not count.
  CHECK(f.fill("code: marks.cu marks 1-2").find("lines 3 to 5](marks.cu#L3-L5)\n```cpp\na();\n"
                                                "b();\n```\n") != std::string::npos);
  // Filling it again changes nothing.
  const std::string once = f.fill("code: a.cu one");
  CHECK(fill_fences(once, f.path / "page.md") == once);
}

TEST_CASE("a fence of two files has what changed in a region", "[fences]") {
  const Folder f;
  CHECK(f.fill("diff: a.cu b.cu one").find(
            "```diff\n    int a;\n-     int b;\n+     int new_b;\n    int c;\n```\n") !=
        std::string::npos);
}

TEST_CASE("a fence that cannot be filled is refused", "[fences]") {
  const Folder f;
  CHECK(f.fill("code: none.cu one").ends_with("none.cu: no such file"));
  CHECK(f.fill("code: a.cu two").ends_with("a.cu has no two lines //! [two]"));
  CHECK(f.fill("code: many.cu many") ==
        "code: many.cu many: 20 lines, at most 15: name some, as 1-15");
  CHECK(f.fill("code: many.cu many 5-21").ends_with("lines 5-21: must be FIRST-LAST of 1 to 20"));
  CHECK(f.fill("code: a.cu") ==
        "code: a.cu: must be code: FILE REGION, or code: FILE REGION FIRST-LAST");
  CHECK_THROWS_AS(fill_fences("\n<!-- code: a.cu one -->\n", f.path / "page.md"), InputError);
}
