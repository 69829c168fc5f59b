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
bool is_name(const std::string& t) { return is_word(t[0]) && !std::isdigit(static_cast<unsigned char>(t[0])); }

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

// Words, numbers, strings and signs; no comments. A preprocessor's #include is left out: its file is read instead.
Tokens lex(const std::string& text, std::vector<std::string>* included = nullptr) {
  Tokens tokens;
  for (std::size_t i = 0; i < text.size();) {
    const char c = text[i];
    std::size_t end = i + 1;
    if (std::isspace(static_cast<unsigned char>(c)) || (c == '\\' && i + 1 < text.size() && text[i + 1] == '\n')) {
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
      if (included && open < line) included->push_back(text.substr(open + 1, text.find('"', open + 1) - open - 1));
      i = line;
      continue;
    }
    if (c == '"' || (c == '\'' && (tokens.empty() || !is_word(i > 0 ? text[i - 1] : ' ')))) {
      while (end < text.size() && text[end] != c) end += text[end] == '\\' ? 2 : 1;
      end = std::min(end + 1, text.size());
    } else if (is_word(c)) {
      while (end < text.size() && (is_word(text[end]) || (text[end] == '\'' && end + 1 < text.size() &&
                                                          is_word(text[end + 1]))))
        ++end;
      // 1.5f and 1e-37 are one number.
      if (std::isdigit(static_cast<unsigned char>(c)))
        while (end < text.size() && (is_word(text[end]) || text[end] == '.' ||
                                     ((text[end] == '-' || text[end] == '+') && std::tolower(text[end - 1]) == 'e')))
          ++end;
    }
    tokens.push_back(text.substr(i, end - i));
    i = end;
  }
  return tokens;
}

// Strings count in asm statements and in macros that are made of them; elsewhere they are words for people.
void drop_messages(Tokens& tokens, bool keep_all) {
  if (keep_all) return;
  bool in_asm = false;
  std::erase_if(tokens, [&](const std::string& t) {
    if (t == "asm") in_asm = true;
    if (t == ";") in_asm = false;
    return t[0] == '"' && !in_asm;
  });
}

// Names that the code declares: after a type or another name, or after > & * and not called there.
std::set<std::string> declared(const Tokens& tokens) {
  static const std::set<std::string> kNoTypes{"return", "else",  "case",   "goto",  "new",    "throw",   "delete",
                                              "sizeof", "using", "typename", "operator", "co_return", "if", "do"};
  std::set<std::string> names;
  for (std::size_t i = 1; i < tokens.size(); ++i) {
    if (!is_name(tokens[i])) continue;
    const std::string& before = tokens[i - 1];
    const bool called = i + 1 < tokens.size() && tokens[i + 1] == "(";
    if (is_name(before) ? !kNoTypes.contains(before) : !called && (before == ">" || before == "&" || before == "*"))
      names.insert(tokens[i]);
  }
  // Words of the language come after types, too.
  for (const char* word : {"const", "int", "float", "unsigned", "auto", "constexpr", "void", "char", "bool", "long", "struct",
                           "class", "double", "short", "static", "inline", "template", "operator", "volatile"})
    names.erase(word);
  std::erase_if(names, [](const std::string& n) { return n.starts_with("__"); });
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

// Whether a file that a step includes holds code of its kernels; the rest of attn/ is the host's.
bool has_device_code(const std::string& path) {
  return path.starts_with("ptx/") || path == "attn/kernel.h" || path == "attn/philox.h" || path == "attn/blas.h" ||
         path.find('/') == path.npos;
}

Tokens tokens_of(const fs::path& root, const fs::path& file) {
  Tokens all;
  std::set<std::string> seen;
  std::vector<fs::path> waiting{file};
  for (std::size_t n = 0; n < waiting.size(); ++n) {
    std::vector<std::string> included;
    Tokens tokens = lex(without_emulator(read(waiting[n])), &included);
    drop_messages(tokens, waiting[n].parent_path().filename() == "ptx");
    all.insert(all.end(), tokens.begin(), tokens.end());
    if (included.empty()) continue;
    for (const std::string& path : included) {
      if (!has_device_code(path) || !seen.insert(path).second) continue;
      const fs::path here = file.parent_path() / path;
      waiting.push_back(path.find('/') == path.npos && fs::exists(here) ? here : root / "common" / path);
      if (path == "attn/blas.h") waiting.push_back(root / "common/attn/blas.cpp");
    }
  }
  return all;
}

// set(ATTN_KERNEL_FLAGS ...), as CMake has it.
Tokens flags_of(const fs::path& root) {
  for (const char* file : {"common/cmake/AttnCuda.cmake", "common/cmake/AttnChapter.cmake"}) {
    const std::string text = read(root / file);
    for (const char* begin : {"set(ATTN_KERNEL_FLAGS ", "$<$<COMPILE_LANGUAGE:CUDA>:"}) {
      const std::size_t at = text.find(begin);
      if (at == text.npos) continue;
      const std::size_t from = at + std::string(begin).size();
      return lex(text.substr(from, text.find_first_of(")>", from) - from));
    }
  }
  return {};
}

std::string number_of(const std::string& step) { return step.substr(0, step.find('_')); }

}  // namespace

Keys kernel_keys(const fs::path& root) {
  Keys keys;
  const Tokens flags = flags_of(root);
  for (const auto& folder : fs::directory_iterator(root)) {
    const std::string chapter = folder.path().filename().string();
    if (!fs::exists(folder.path() / "chapter.cpp")) continue;
    for (const auto& entry : fs::directory_iterator(folder.path())) {
      const std::string step = entry.path().stem().string();
      if (entry.path().extension() != ".cu" || step.starts_with("sweep")) continue;
      Tokens tokens = tokens_of(root, entry.path());
      tokens.insert(tokens.end(), flags.begin(), flags.end());
      keys[chapter + "/" + step] = hash(std::move(tokens), step);
    }
  }
  return keys;
}

std::string key_of(const Keys& keys, const std::string& chapter, const std::string& step) {
  if (const auto found = keys.find(chapter + "/" + step); found != keys.end()) return found->second;
  const std::string begin = chapter + "/" + number_of(step) + "_";
  const auto found = keys.lower_bound(begin);
  return found != keys.end() && found->first.starts_with(begin) ? found->second : "";
}

std::string key_of_text(const std::string& text, const std::string& name) {
  Tokens tokens = lex(without_emulator(text));
  drop_messages(tokens, false);
  return hash(std::move(tokens), name);
}

}  // namespace attn::report
