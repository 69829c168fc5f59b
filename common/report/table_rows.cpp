#include "report/table_rows.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <regex>
#include <set>
#include <utility>

namespace attn::report {
namespace {

int nesting(const std::string& t) {
  return (t == "(" || t == "{" || t == "[") - (t == ")" || t == "}" || t == "]");
}

class TableRows {
 public:
  TableRows(const Tokens& function, std::vector<Chunk>& chunks) : chunks_(chunks) {
    const auto body = std::ranges::find(function, "{");
    Tokens statement;
    int depth = 0;
    for (auto t = body + (body != function.end()); t < function.end(); ++t) {
      depth += nesting(*t);
      if (depth < 0) break;
      if (*t != ";" || depth > 0) {
        statement.push_back(*t);
        continue;
      }
      add(statement);
      statement.clear();
    }
    for (auto& [step, row] : rows) append(row, for_all_);
  }
  std::map<std::string, Tokens> rows;

 private:
  void add(const Tokens& s) {
    bool found = false;
    for (std::size_t i = 0; i < s.size(); ++i)
      if (const std::string step = step_in(s[i]); !step.empty()) add_row(s, i, step), found = true;
    if (found || s.empty() || s[0] == "return") return;
    if (s.size() > 4 && s[2] == "steps" && s[4] == "back" && !order_.empty())
      append(rows[order_.back()], s);
    else if (owners_.contains(s[0]))
      append(rows[owners_[s[0]]], s);
    else if (s.size() > 4 && s[4] == "push_back")
      copied_ = s;  // c.steps.push_back(c.steps[3]), before it is renamed
    else if (!declare(s))
      append(for_all_, s);
  }

  // The call or braces that contain the name of a step; else the statement.
  void add_row(const Tokens& s, std::size_t at, const std::string& step) {
    std::size_t begin = 0, end = s.size();
    int depth = 0;
    for (std::size_t i = at; i-- > 0 && depth < 1;)
      if ((depth += nesting(s[i])) == 1) begin = i > 0 && is_name(s[i - 1]) ? i - 1 : i;
    if (depth == 1) {
      depth = 0;
      for (end = begin + is_name(s[begin]); end < s.size(); ++end)
        if ((depth += nesting(s[end])) == 0) break;
      if (begin > 1 && s[begin - 1] == "=") owners_[s[begin - 2]] = step;
    } else {
      append(rows[step], copied_);
    }
    copied_.clear();
    const Tokens row(s.begin() + static_cast<std::ptrdiff_t>(begin),
                     s.begin() + static_cast<std::ptrdiff_t>(std::min(end + 1, s.size())));
    append(rows[step], row);
    order_.push_back(step);
    // Includes rows that it copies from: c.steps[3].workspaces.
    const Tokens all = rows[step];
    for (std::size_t i = 0; i + 3 < all.size(); ++i)
      if (all[i] == "steps" && all[i + 1] == "[")
        if (const auto n = static_cast<std::size_t>(std::atoi(all[i + 2].c_str()));
            n + 1 < order_.size())
          append(rows[step], rows[order_[n]]);
  }

  bool declare(const Tokens& s) {
    bool any = false;
    int depth = 0;
    for (std::size_t i = 0; i + 1 < s.size(); ++i) {
      depth += nesting(s[i]);
      if (depth > 0 || i == 0 || !is_name(s[i]) || s[i - 1] == ".") continue;
      if (s[i + 1] == "=" || s[i + 1] == "{") chunks_.push_back({s, s[i]}), any = true;
    }
    return any;
  }

  std::vector<Chunk>& chunks_;
  std::vector<std::string> order_;
  std::map<std::string, std::string> owners_;  // variable -> row
  Tokens copied_, for_all_;
};

}  // namespace

bool is_step_name(const std::string& name) {
  static const std::regex kStep("[a-z][0-9]+_[a-z0-9_]+");
  return std::regex_match(name, kStep);
}

std::string step_in(const std::string& token) {
  if (token.size() < 3 || token[0] != '"') return "";
  const std::string text = token.substr(1, token.size() - 2);
  return is_step_name(text) ? text : "";
}

Tokens without_model(const Tokens& tokens) {
  static const std::set<std::string> kModel{"cost",  "refuses", "idea",    "support",
                                            "takes", "choices", "logical", "operation"};
  Tokens kept;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] == "." && i + 2 < tokens.size() && kModel.contains(tokens[i + 1]) &&
        tokens[i + 2] == "=") {
      int depth = 0;
      for (; i < tokens.size(); ++i) {
        depth += nesting(tokens[i]);
        if (depth < 0 || (depth == 0 && (tokens[i] == "," || tokens[i] == ";"))) break;
      }
      if (i == tokens.size()) break;
    }
    kept.push_back(tokens[i]);
  }
  return kept;
}

std::map<std::string, Tokens> table_rows(const Tokens& function, std::vector<Chunk>& chunks) {
  return TableRows(function, chunks).rows;
}

}  // namespace attn::report
