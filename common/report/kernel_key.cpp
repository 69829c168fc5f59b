#include "report/kernel_key.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <vector>

#include "report/sha256.h"

namespace attn::report {
namespace {

namespace fs = std::filesystem;
using Tokens = std::vector<std::string>;

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }
bool is_name(const std::string& t) {
  return is_word(t[0]) && !std::isdigit(static_cast<unsigned char>(t[0]));
}

// Without the branches that only the emulator compiles. Other conditions are kept whole.
std::string without_emulator(const std::string& text) {
  std::istringstream lines(text);
  std::string out;
  enum Branch { kKept, kEmulated, kOther };  // of each open condition
  std::vector<Branch> open;
  for (std::string line; std::getline(lines, line);) {
    const std::size_t at = line.find_first_not_of(" \t");
    const std::string directive = at != line.npos && line[at] == '#' ? line.substr(at) : "";
    const bool kept = std::ranges::find(open, kEmulated) == open.end();
    if (directive.starts_with("#if")) {
      open.push_back(directive.starts_with("#ifdef ATTN_EMULATED")    ? kEmulated
                     : directive.starts_with("#ifndef ATTN_EMULATED") ? kKept
                                                                      : kOther);
      if (open.back() == kOther && kept) out += line + '\n';
    } else if (!open.empty() && directive.starts_with("#else") && open.back() != kOther) {
      open.back() = open.back() == kKept ? kEmulated : kKept;
    } else if (!open.empty() && directive.starts_with("#endif")) {
      const bool other = open.back() == kOther;
      open.pop_back();
      if (other && kept) out += line + '\n';
    } else if (kept) {
      out += line + '\n';
    }
  }
  return out;
}

// Around the tokens of a line of the preprocessor.
const std::string kDirective = "\x01", kEndOfDirective = "\x02";

// Words, numbers, strings and signs; no comments. A preprocessor's #include is left out: its file
// is read instead.
Tokens lex(const std::string& text, std::vector<std::string>* included = nullptr) {
  Tokens tokens;
  for (std::size_t i = 0; i < text.size();) {
    const char c = text[i];
    std::size_t end = i + 1;
    if (std::isspace(static_cast<unsigned char>(c)) ||
        (c == '\\' && i + 1 < text.size() && text[i + 1] == '\n')) {
      ++i;
      continue;
    }
    if (c == '/' && text.compare(i, 2, "//") == 0) {
      i = std::min(text.find('\n', i), text.size());
      continue;
    }
    if (c == '/' && text.compare(i, 2, "/*") == 0) {
      const std::size_t close = text.find("*/", i + 2);
      i = close == text.npos ? text.size() : close + 2;
      continue;
    }
    if (c == '#' && text.compare(i, 8, "#include") == 0) {
      const std::size_t line = std::min(text.find('\n', i), text.size()), open = text.find('"', i);
      if (included && open < line)
        included->push_back(text.substr(open + 1, text.find('"', open + 1) - open - 1));
      i = line;
      continue;
    }
    if (c == '#' && (i == 0 || text.find_last_not_of(" \t", i - 1) == text.npos ||
                     text[text.find_last_not_of(" \t", i - 1)] == '\n')) {
      std::size_t line = text.find('\n', i);
      while (line != text.npos && text[line - 1] == '\\') line = text.find('\n', line + 1);
      line = std::min(line, text.size());
      tokens.push_back(kDirective);
      for (std::string& t : lex(text.substr(i + 1, line - i - 1))) tokens.push_back(std::move(t));
      tokens.push_back(kEndOfDirective);
      i = line;
      continue;
    }
    if (c == '"' || (c == '\'' && (tokens.empty() || !is_word(i > 0 ? text[i - 1] : ' ')))) {
      while (end < text.size() && text[end] != c) end += text[end] == '\\' ? 2 : 1;
      end = std::min(end + 1, text.size());
    } else if (is_word(c)) {
      while (end < text.size() &&
             (is_word(text[end]) ||
              (text[end] == '\'' && end + 1 < text.size() && is_word(text[end + 1]))))
        ++end;
      // 1.5f and 1e-37 are one number.
      if (std::isdigit(static_cast<unsigned char>(c)))
        while (end < text.size() &&
               (is_word(text[end]) || text[end] == '.' ||
                ((text[end] == '-' || text[end] == '+') && std::tolower(text[end - 1]) == 'e')))
          ++end;
    }
    tokens.push_back(text.substr(i, end - i));
    i = end;
  }
  return tokens;
}

// Strings count in asm statements and in macros that are made of them; elsewhere they are words for
// people.
void drop_messages(Tokens& tokens, bool keep_all) {
  if (keep_all) return;
  bool in_asm = false;
  std::erase_if(tokens, [&](const std::string& t) {
    if (t == "asm") in_asm = true;
    if (t == ";") in_asm = false;
    return t[0] == '"' && !in_asm;
  });
}

// A name of CUDA or of C++: float4, dim3, int64_t, threadIdx, __ldg. It counts as it is, wherever
// it stands.
bool is_known(const std::string& t) {
  static const std::set<std::string> kWords{
      "const",     "constexpr", "int",      "float",    "unsigned", "signed", "auto",     "void",
      "char",      "bool",      "long",     "struct",   "class",    "double", "short",    "static",
      "inline",    "template",  "operator", "volatile", "extern",   "enum",   "typename", "dim3",
      "threadIdx", "blockIdx",  "blockDim", "gridDim",  "warpSize", "std",    "pragma",   "define"};
  static const std::set<std::string> kVectors{"char", "uchar",    "short",    "ushort", "int",
                                              "uint", "long",     "ulong",    "float",  "double",
                                              "half", "longlong", "ulonglong"};
  if (kWords.contains(t) || t.starts_with("__") || t.ends_with("_t")) return true;
  return t.size() > 1 && t.back() >= '1' && t.back() <= '4' &&
         kVectors.contains(t.substr(0, t.size() - 1));
}

// Names that the code declares: after a type or another name, or after > & * and not called there.
// What is missed counts as it is, so that renaming it changes the key; nothing that means something
// to the compiler may be taken for one.
std::set<std::string> declared(const Tokens& tokens) {
  static const std::set<std::string> kNoTypes{"return",    "else",   "case",   "goto",   "new",
                                              "throw",     "delete", "sizeof", "using",  "operator",
                                              "co_return", "if",     "do",     "pragma", "define"};
  std::set<std::string> names;
  for (std::size_t i = 1; i + 1 < tokens.size(); ++i) {
    if (!is_name(tokens[i]) || is_known(tokens[i])) continue;
    const std::string &before = tokens[i - 1], &after = tokens[i + 1];
    const bool type = is_name(after) || after == "<" || after == "&" || after == "*" ||
                      after == ":";  // const T x
    const bool after_name = is_name(before) && !kNoTypes.contains(before) && !type;
    const bool after_sign = (before == ">" || before == "&" || before == "*") && after != "(";
    if (after_name || after_sign) names.insert(tokens[i]);
  }
  return names;
}

std::string hash(Tokens tokens, const std::string& step) {
  const std::set<std::string> ours = declared(tokens);
  std::map<std::string, std::size_t> order;
  std::string text;
  for (const std::string& t : tokens) {
    if (t == step)
      text += "STEP";
    else if (ours.contains(t))
      text.append("$").append(std::to_string(order.emplace(t, order.size()).first->second));
    else
      text += t;
    text += '\n';
  }
  return sha256(text).substr(0, 16);
}

// A declaration of a header, with the name by which others use it; without one nobody does.
struct Chunk {
  Tokens tokens;
  std::string name;
  bool used = false;
};

std::string name_of(const Tokens& tokens) {
  static const std::set<std::string> kAttributes{"__launch_bounds__", "__align__", "alignas",
                                                 "decltype",          "requires",  "static_assert",
                                                 "__attribute__",     "if",        "explicit"};
  if (tokens[0] == kDirective) return tokens.size() > 2 && tokens[1] == "define" ? tokens[2] : "";
  std::size_t i = 0;
  if (tokens[0] == "template") {
    int depth = 0;
    for (i = 1; i < tokens.size(); ++i) {
      depth += tokens[i] == "<" ? 1 : tokens[i] == ">" ? -1 : 0;
      if (depth == 0) break;
    }
    ++i;
  }
  for (std::string before; i < tokens.size(); ++i) {
    const std::string& t = tokens[i];
    if (t == "operator") return "";
    if ((t == "=" || t == "{" || t == ";" || t == "[" || t == ":") && !before.empty())
      return before;
    if (t == "(" && !before.empty() && !kAttributes.contains(before)) return before;
    if (t == "<" && (tokens[0] == "struct" || tokens[0] == "template") && !before.empty() &&
        i + 1 < tokens.size() && std::ranges::find(tokens, "struct") != tokens.end())
      return before;  // a specialisation
    before = is_name(t) && t != "const" && t != "enum" && t != "class" ? t : std::string();
    if (t == "struct" || t == "inline" || t == "constexpr") before.clear();
  }
  return "";
}

// A header by declarations; namespaces are opened and forgotten.
std::vector<Chunk> chunks_of(const Tokens& tokens) {
  std::vector<Chunk> chunks;
  Tokens open;
  int depth = 0;
  const auto close = [&] {
    if (!open.empty()) chunks.push_back({open, name_of(open)});
    open.clear();
  };
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::string& t = tokens[i];
    if (t == kDirective && depth == 0) {
      if (!open.empty() && open != Tokens{"inline"}) close();
      while (i < tokens.size() && tokens[i] != kEndOfDirective) open.push_back(tokens[i++]);
      close();
      continue;
    }
    if (depth == 0 && t == "namespace") {
      while (i < tokens.size() && tokens[i] != "{" && tokens[i] != ";") ++i;
      open.clear();
      continue;
    }
    if (depth == 0 && open.empty() && (t == "}" || t == ";")) continue;
    open.push_back(t);
    if (t == "{" || t == "(") ++depth;
    if (t == "}" || t == ")") --depth;
    // A body ends a function; a class ends with its semicolon.
    const bool body = t == "}" && (i + 1 == tokens.size() || tokens[i + 1] != ";");
    if (depth == 0 && (t == ";" || body)) close();
  }
  close();
  return chunks;
}

// The members of a plain struct, each with its type: "int window_left", "static constexpr int
// kNoWindow = 1 << 30".
std::vector<Chunk> members_of(const Tokens& tokens) {
  std::vector<Chunk> members;
  auto at = std::ranges::find(tokens, "{");
  while (at != tokens.end() && ++at != tokens.end()) {
    const auto end = std::find(at, tokens.end(), ";");
    if (end == tokens.end()) break;
    const auto value = std::find(at, end, "=");
    const Tokens declaration(at, value);
    Tokens type;
    for (std::size_t i = 0; i < declaration.size(); ++i) {
      const bool last = i + 1 == declaration.size() || declaration[i + 1] == ",";
      if (declaration[i] == ",") continue;
      if (!last) {
        type.push_back(declaration[i]);
        continue;
      }
      Chunk member{type, declaration[i]};
      member.tokens.push_back(declaration[i]);
      member.tokens.insert(member.tokens.end(), value, end);
      members.push_back(std::move(member));
    }
    at = end;
  }
  return members;
}

// Whether a file that a step includes holds code of its kernels; the rest of attn/ is the host's.
bool has_device_code(const std::string& path) {
  return path.starts_with("ptx/") || path == "attn/kernel.h" || path == "attn/philox.h" ||
         path == "attn/blas.h" || path == "attn/problem.h" || path.find('/') == path.npos;
}

// Drops NAME(...) of these names.
void drop_calls(Tokens& tokens, const std::set<std::string>& names) {
  Tokens kept;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (!names.contains(tokens[i]) || i + 1 == tokens.size() || tokens[i + 1] != "(") {
      kept.push_back(std::move(tokens[i]));
      continue;
    }
    int depth = 0;
    for (++i; i < tokens.size(); ++i) {
      depth += (tokens[i] == "(") - (tokens[i] == ")");
      if (depth == 0) break;
    }
  }
  tokens = std::move(kept);
}

// The step's file, then of the headers what it uses, in the order in which they hold it.
Tokens tokens_of(const fs::path& root, const fs::path& file) {
  std::vector<std::string> included;
  Tokens all = lex(without_emulator(read(file)), &included);
  drop_messages(all, false);
  included.push_back("attn/problem.h");  // through attn/step.h
  std::vector<Chunk> chunks;
  std::set<std::string> seen;
  for (std::size_t n = 0; n < included.size(); ++n) {
    const std::string path = included[n];
    if (!has_device_code(path) || !seen.insert(path).second) continue;
    const fs::path here = file.parent_path() / path;
    const bool own = path.find('/') == path.npos && fs::exists(here);
    std::vector<fs::path> files{own ? here : root / "common" / path};
    if (path == "attn/blas.h") files.push_back(root / "common/attn/blas.cpp");
    for (const fs::path& header : files) {
      Tokens tokens = lex(without_emulator(read(header)), &included);
      drop_messages(tokens, path.starts_with("ptx/"));
      for (Chunk& chunk : chunks_of(tokens)) {
        // Of attn/kernel.h what launches and picks types is the host's.
        const bool device = std::ranges::find(chunk.tokens, "__device__") != chunk.tokens.end();
        if (path == "attn/kernel.h" && !device && chunk.tokens[0] != kDirective &&
            chunk.name.starts_with("launch"))
          continue;
        if (path == "attn/kernel.h" && !device && chunk.name.starts_with("dispatch")) continue;
        if (path != "attn/problem.h")
          chunks.push_back(std::move(chunk));
        else if (chunk.name == "Shape")  // a kernel's parameter: of it what the kernel reads
          std::ranges::move(members_of(chunk.tokens), std::back_inserter(chunks));
      }
    }
  }
  // Macros that stand for nothing on a GPU are nothing, and so is what they are given.
  std::set<std::string> nothing;
  std::erase_if(chunks, [&](const Chunk& c) {
    if (c.tokens[0] != kDirective || c.tokens.size() < 3 || c.tokens[1] != "define") return false;
    const bool empty =
        c.tokens.size() == 3 ||
        (c.tokens[3] == "(" && std::ranges::find(c.tokens, ")") == c.tokens.end() - 1);
    if (empty) nothing.insert(c.name);
    return empty;
  });
  drop_calls(all, nothing);
  for (Chunk& c : chunks) drop_calls(c.tokens, nothing);
  std::set<std::string> wanted(all.begin(), all.end());
  for (bool grew = true; grew;) {
    grew = false;
    for (Chunk& c : chunks) {
      // An operator has no name to look for.
      const bool unnamed =
          c.name.empty() && std::ranges::find(c.tokens, "__device__") != c.tokens.end();
      if (c.used || !(unnamed || wanted.contains(c.name))) continue;
      c.used = grew = true;
      wanted.insert(c.tokens.begin(), c.tokens.end());
    }
  }
  for (const Chunk& c : chunks)
    if (c.used) all.insert(all.end(), c.tokens.begin(), c.tokens.end());
  std::erase_if(all, [&](const std::string& t) {
    return nothing.contains(t) || t == kDirective || t == kEndOfDirective;
  });
  return all;
}

// What AttnChapter.cmake gives nvcc for kernels: flags, but for those that leave code alone, and
// Hopper's architecture.
Tokens flags_of(const fs::path& root, bool hopper) {
  const std::string text = read(root / "common/cmake/AttnChapter.cmake");
  Tokens all;
  for (const char* begin : {"$<$<COMPILE_LANGUAGE:CUDA>:", "CUDA_ARCHITECTURES "}) {
    if (begin[0] == 'C' && !hopper) continue;
    const std::size_t at = text.find(begin);
    if (at == text.npos) continue;
    const std::size_t from = at + std::string(begin).size();
    std::istringstream words(text.substr(from, text.find_first_of(")>", from) - from));
    for (std::string word; words >> word;)
      if (word != "-lineinfo" && !word.starts_with("-Xcompiler")) all.push_back(word);
  }
  return all;
}

// The steps that a chapter compiles for Hopper's architecture: those after HOPPER_STEPS; "*":
// HOPPER, all of them.
std::set<std::string> hopper_steps(const std::string& cmake) {
  std::set<std::string> steps;
  bool listed = false;
  for (const std::string& word : lex(cmake)) {
    if (word == "HOPPER") steps.insert("*");
    if (std::isupper(static_cast<unsigned char>(word[0]))) listed = word == "HOPPER_STEPS";
    if (listed && std::islower(static_cast<unsigned char>(word[0]))) steps.insert(word);
    if (word == ")") listed = false;
  }
  return steps;
}

std::string number_of(const std::string& step) { return step.substr(0, step.find('_')); }

}  // namespace

Keys kernel_keys(const fs::path& root) {
  Keys keys;
  for (const auto& folder : fs::directory_iterator(root)) {
    const std::string chapter = folder.path().filename().string();
    if (!fs::exists(folder.path() / "chapter.cpp")) continue;
    const std::set<std::string> hopper = hopper_steps(read(folder.path() / "CMakeLists.txt"));
    for (const auto& entry : fs::directory_iterator(folder.path())) {
      const std::string step = entry.path().stem().string();
      // no sweep, no preparation
      const bool is_step = step.size() > 1 && std::isdigit(static_cast<unsigned char>(step[1]));
      if (entry.path().extension() != ".cu" || !is_step) continue;
      Tokens tokens = tokens_of(root, entry.path());
      const bool for_hopper = hopper.contains(step) || hopper.contains("*");
      std::ranges::copy(flags_of(root, for_hopper), std::back_inserter(tokens));
      keys[chapter + "/" + step] = hash(std::move(tokens), step);
    }
  }
  // What the tests of common/ run on a GPU.
  const fs::path tests = root / "common/tests";
  if (fs::is_directory(tests))
    for (const auto& entry : fs::directory_iterator(tests)) {
      if (entry.path().extension() != ".cu") continue;
      const std::string name = entry.path().stem().string();
      Tokens tokens = tokens_of(root, entry.path());
      std::ranges::copy(flags_of(root, name.starts_with("hopper")), std::back_inserter(tokens));
      keys["common/" + name] = hash(std::move(tokens), "");
    }
  return keys;
}

std::string key_of(const Keys& keys, const std::string& chapter, const std::string& step) {
  if (const auto found = keys.find(chapter + "/" + step); found != keys.end()) return found->second;
  const std::string begin = chapter + "/" + number_of(step) + "_";
  const auto found = keys.lower_bound(begin);
  return found != keys.end() && found->first.starts_with(begin) ? found->second : "-";
}

std::string key_of_text(const std::string& text, const std::string& name) {
  Tokens tokens = lex(without_emulator(text));
  drop_messages(tokens, false);
  std::erase_if(tokens,
                [](const std::string& t) { return t == kDirective || t == kEndOfDirective; });
  return hash(std::move(tokens), name);
}

}  // namespace attn::report
