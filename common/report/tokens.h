/// \file
/// Source text as tokens, to compare two versions regardless of comments, layout, messages and the
/// names that they declare.
#pragma once

#include <string>
#include <vector>

namespace attn::report {

using Tokens = std::vector<std::string>;

/// Enclose the tokens of a preprocessor line.
inline const std::string kDirective = "\x01", kEndOfDirective = "\x02";

/// `text` without the branches that only the emulator compiles. Other conditions are kept
/// completely.
std::string without_emulator(const std::string& text);

/// The words, numbers, strings and punctuation of C++, without comments. Names of files that it
/// includes in quotes are added to `included`.
Tokens lex(const std::string& text, std::vector<std::string>* included = nullptr);

inline void append(Tokens& all, const Tokens& more) {
  all.insert(all.end(), more.begin(), more.end());
}

/// Removes strings except those of asm statements: they are messages.
void drop_messages(Tokens&);

/// Tokens of Python without comments and strings of several words; indentation counts.
Tokens lex_python(const std::string& text);
/// The lines of a shell script or of a list of words, without comments.
Tokens lex_shell(const std::string& text);

/// A declaration, with the name by which others use it; without a name it is not used by others.
struct Chunk {
  Tokens tokens;
  std::string name;

  bool has(const std::string& token) const;
  /// A function that only the host can call.
  bool is_host_function() const;
};

/// Splits a file into declarations; namespaces are dropped.
std::vector<Chunk> chunks_of(const Tokens&);

/// The members of a plain struct, each with its type: "int window_left".
std::vector<Chunk> members_of(const Tokens&);

/// The chunks whose names are in `wanted`, and those that they name in turn, sorted by name.
/// Unnamed device code, such as an operator, is always included. `members`: names after a dot
/// count.
std::vector<const Chunk*> used_chunks(const std::vector<Chunk>&, const Tokens& wanted,
                                      bool members);

/// The body and parameters of the first function defined by that name.
Tokens function_in(const Tokens&, const std::string& name);

/// 16 hexadecimal digits. Names that a chunk declares are replaced by their order in it, names of
/// chunks and members by their order over all chunks. `step` counts as the word STEP.
std::string hash(const std::vector<Chunk>&, const std::string& step);

bool is_name(const std::string& token);

}  // namespace attn::report
