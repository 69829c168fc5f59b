#include "report/tokens.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <sstream>

#include "report/sha256.h"

namespace attn::report {
namespace {

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }
}  // namespace

bool is_name(const std::string& t) {
  return is_word(t[0]) && !std::isdigit(static_cast<unsigned char>(t[0]));
}

std::string without_emulator(const std::string& text) {
  std::istringstream lines(text);
  std::string out;
  enum Branch { kKept, kEmulated, kOther };  // state of each open condition
  std::vector<Branch> open;
  for (std::string line; std::getline(lines, line);) {
    const std::size_t at = line.find_first_not_of(" \t");
    const std::string directive = at != line.npos && line[at] == '#' ? line.substr(at) : "";
    const bool kept = std::ranges::find(open, kEmulated) == open.end();
    if (directive.starts_with("#if")) {
      const bool unless = directive.starts_with("#ifndef ");
      const std::size_t before = std::min<std::size_t>(directive.size(), unless ? 8 : 7);
      const std::string name = directive.substr(before);
      const bool known = (unless || directive.starts_with("#ifdef ")) &&
                         (name.starts_with("ATTN_EMULATED") ||
                          name.starts_with("ATTN_RECORD_TIMELINE"));  // a recorded build
      open.push_back(!known ? kOther : unless ? kKept : kEmulated);
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

// #include lines are skipped: their files are read separately.
Tokens lex(const std::string& text, std::vector<std::string>* included) {
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
      // 1.5f and 1e-37 are single tokens.
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

// Strings count only in asm statements and in macros that contain them; elsewhere they are
// messages.
void drop_messages(Tokens& tokens) {
  bool in_asm = false;
  std::erase_if(tokens, [&](const std::string& t) {
    if (t == "asm") in_asm = true;
    if (t == ";") in_asm = false;
    return t[0] == '"' && !in_asm;
  });
}

namespace {

// A name of CUDA or C++: float4, dim3, int64_t, threadIdx, __ldg. It always counts as it is.
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

// The names that the code declares: after a type or another name, or after > & * if not called
// there. A declaration that this misses counts as it is, so renaming it changes the key. A name
// that the compiler knows must not be taken for a declaration.
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

}  // namespace

std::string hash(const std::vector<Chunk>& chunks, const std::string& step) {
  std::vector<std::set<std::string>> local;
  std::set<std::string> shared;  // names of chunks, and members
  for (const Chunk& c : chunks) {
    local.push_back(declared(c.tokens));
    if (local.back().contains(c.name)) shared.insert(c.name);
    if (c.tokens.size() > 1 && c.tokens.back() == ";" && c.tokens[c.tokens.size() - 2] == "}")
      shared.insert(local.back().begin(), local.back().end());
  }
  std::map<std::string, std::size_t> shared_order;
  std::string text;
  const auto number = [&](const char* sign, auto& order, const std::string& t) {
    text.append(sign).append(std::to_string(order.emplace(t, order.size()).first->second));
  };
  for (std::size_t n = 0; n < chunks.size(); ++n) {
    std::map<std::string, std::size_t> order;
    for (const std::string& t : chunks[n].tokens) {
      if (t == kDirective || t == kEndOfDirective) continue;
      if (t == step)
        text += "STEP";
      else if (shared.contains(t))
        number("$$", shared_order, t);
      else if (local[n].contains(t))
        number("$", order, t);
      else
        text += t;
      text += '\n';
    }
  }
  return sha256(text).substr(0, 16);
}

bool Chunk::has(const std::string& token) const {
  return std::ranges::find(tokens, token) != tokens.end();
}
bool Chunk::is_host_function() const {
  return tokens.back() == "}" && tokens[0] != kDirective && !has("__device__") &&
         !has("__global__") && !has("constexpr");
}

namespace {

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
    if (t == ":" && i + 1 < tokens.size() && tokens[i + 1] == ":") {
      // A member is named by its class; namespaces are in lower case.
      if (!before.empty() && std::isupper(static_cast<unsigned char>(before[0]))) return before;
      ++i;
      continue;
    }
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

}  // namespace

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
    // A function ends with its body, a class with its semicolon.
    const bool body = t == "}" && (i + 1 == tokens.size() || tokens[i + 1] != ";");
    if (depth == 0 && (t == ";" || body)) close();
  }
  close();
  return chunks;
}

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

std::vector<const Chunk*> used_chunks(const std::vector<Chunk>& chunks, const Tokens& wanted,
                                      bool members) {
  std::set<std::string> names;
  const auto add = [&](const Tokens& tokens) {
    for (std::size_t i = 0; i < tokens.size(); ++i)
      if (members || i == 0 || (tokens[i - 1] != "." && tokens[i - 1] != ">"))
        names.insert(tokens[i]);
  };
  add(wanted);
  std::vector<bool> used(chunks.size());
  for (bool grew = true; grew;) {
    grew = false;
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      const Chunk& c = chunks[i];
      const bool is_operator = c.name.empty() && c.has("__device__");
      if (used[i] || !(is_operator || names.contains(c.name))) continue;
      used[i] = grew = true;
      add(c.tokens);
    }
  }
  std::vector<const Chunk*> found;
  for (std::size_t i = 0; i < chunks.size(); ++i)
    if (used[i]) found.push_back(&chunks[i]);
  std::ranges::stable_sort(found, {}, &Chunk::name);
  return found;
}

Tokens function_in(const Tokens& tokens, const std::string& name) {
  for (std::size_t i = 0; i + 1 < tokens.size(); ++i) {
    if (tokens[i] != name || tokens[i + 1] != "(") continue;
    int depth = 0;
    for (std::size_t n = i + 1; n < tokens.size(); ++n) {
      const std::string& t = tokens[n];
      if (depth == 0 && t == ";") break;  // a call, or a declaration
      depth += (t == "(" || t == "{") - (t == ")" || t == "}");
      if (depth < 0) break;
      if (depth == 0 && t == "}")
        return Tokens(tokens.begin() + static_cast<std::ptrdiff_t>(i),
                      tokens.begin() + static_cast<std::ptrdiff_t>(n) + 1);
    }
  }
  return {};
}

Tokens lex_python(const std::string& text) {
  Tokens tokens;
  int depth = 0;
  bool line_begins = true;
  for (std::size_t i = 0; i < text.size();) {
    const char c = text[i];
    std::size_t end = i + 1;
    if (c == '\n') {
      line_begins = line_begins || depth == 0;
    } else if (c == '#') {
      end = std::min(text.find('\n', i), text.size());
    } else if (!std::isspace(static_cast<unsigned char>(c))) {
      if (line_begins) {  // indentation is part of the syntax
        const std::size_t begin = i == 0 ? text.npos : text.rfind('\n', i - 1);
        tokens.push_back("indent" + std::to_string(i - (begin == text.npos ? 0 : begin + 1)));
        line_begins = false;
      }
      if (c == '"' || c == '\'') {
        const std::string quote =
            text.compare(i, 3, std::string(3, c)) == 0 ? std::string(3, c) : std::string(1, c);
        end = i + quote.size();
        while (end < text.size() && text.compare(end, quote.size(), quote) != 0)
          end += text[end] == '\\' ? 2 : 1;
        end = std::min(end + quote.size(), text.size());
        if (text.substr(i, end - i).find(' ') != text.npos) {  // it is a message
          i = end;
          continue;
        }
      } else if (is_word(c)) {
        while (end < text.size() && is_word(text[end])) ++end;
      }
      depth += (c == '(' || c == '[' || c == '{') - (c == ')' || c == ']' || c == '}');
      tokens.push_back(text.substr(i, end - i));
    }
    i = end;
  }
  return tokens;
}

Tokens lex_shell(const std::string& text) {
  Tokens tokens;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    for (std::string word; words >> word && word[0] != '#';) tokens.push_back(word);
  }
  return tokens;
}

}  // namespace attn::report
