/// \file
/// Source text as tokens, so that two versions of it can be compared without comments, layout,
/// messages and the names that they declare.
#pragma once

#include <string>
#include <vector>

namespace attn::report {

using Tokens = std::vector<std::string>;

/// Stand around the tokens of a line of the preprocessor.
inline const std::string kDirective = "\x01", kEndOfDirective = "\x02";

/// `text` without the branches that only the emulator compiles. Other conditions are kept whole.
std::string without_emulator(const std::string& text);

/// The words, numbers, strings and signs of C++; no comments. Names of files that it includes in
/// quotes are added to `included`.
Tokens lex(const std::string& text, std::vector<std::string>* included = nullptr);

/// Removes strings but for those of asm statements: they are messages.
void drop_messages(Tokens&);

/// Tokens of Python: no comments, no texts of several words; indentation counts.
Tokens lex_python(const std::string& text);
/// The lines of a shell script or of a list of words; no comments.
Tokens lex_shell(const std::string& text);

/// A declaration, with the name by which others use it; without a name nobody does.
struct Chunk {
  Tokens tokens;
  std::string name;

  bool has(const std::string& token) const;
  /// A function that only the host can call.
  bool is_host_function() const;
};

/// A file by declarations; namespaces are opened and forgotten.
std::vector<Chunk> chunks_of(const Tokens&);

/// The members of a plain struct, each with its type: "int window_left".
std::vector<Chunk> members_of(const Tokens&);

/// The chunks whose names are in `wanted`, and those that they name in turn, sorted by name. Device
/// code without a name, an operator, is always taken. `members`: what stands after a point counts.
std::vector<const Chunk*> used_chunks(const std::vector<Chunk>&, const Tokens& wanted,
                                      bool members);

/// The body of the first function that is defined by that name, with its parameters.
Tokens function_in(const Tokens&, const std::string& name);

/// 16 hexadecimal digits. A name that a chunk declares counts as the order in which it comes there;
/// names of chunks and of members in all of them. `step` counts as the word STEP.
std::string hash(const std::vector<Chunk>&, const std::string& step);

bool is_name(const std::string& token);

}  // namespace attn::report
