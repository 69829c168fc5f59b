/// \file
/// What the kinds of tables share: reading a report, figures as text, a table as Markdown.
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "attn/error.h"

namespace attn::report {

/// A report that a marker names is not there: nobody has measured it yet.
struct NotMeasured : InputError {
  using InputError::InputError;
};

/// `path` if there is such a file, or such a document in a container. Throws NotMeasured.
const std::filesystem::path& existing(const std::filesystem::path& path);
/// Throws NotMeasured, or InputError for what is no JSON object.
nlohmann::json read_json(const std::filesystem::path&);

/// A table whose rows may lack cells. Columns have a key of their own, because titles can be alike:
/// "x flash" of one step and of the next.
class Grid {
 public:
  void add_row() { rows_.emplace_back(); }
  void add_column(const std::string& key, const std::string& title);
  /// Into the row that was added last.
  void put(const std::string& key, std::string cell) { rows_.back()[key] = std::move(cell); }
  void add(const std::string& key, const std::string& title, std::string cell) {
    add_column(key, title);
    put(key, std::move(cell));
  }
  bool empty() const { return rows_.empty(); }
  /// "-" where a row has no cell. Columns of figures are aligned at the right.
  std::string markdown() const;

 private:
  std::vector<std::pair<std::string, std::string>> columns_;  // key, title
  std::vector<std::map<std::string, std::string>> rows_;
};

std::string milliseconds(double s);
/// TFLOP/s, without the unit.
std::string rate(double flop_per_s);
/// GB, and GB/s, without the unit.
std::string gigabytes(double bytes);
std::string gigabytes_per_s(double bytes_per_s);
std::string code(const std::string& name);  ///< "`v1_global`"

/// "B=4 Hq=16 Hkv=16 N=4096 d=128 bf16 causal"; for what works on rows "8192 rows x 65536 columns
/// bf16".
std::string problem_text(const nlohmann::json& problem);
/// Whether it is of rows of scores alone. Files of before it was said: those have no head dim.
bool is_matrix(const nlohmann::json& problem);
/// The measured rate of a copy; 0 where it was not measured.
double measured_copy(const nlohmann::json& roofs);
/// A step whose rate is said in bytes a second: the operation counts no arithmetic.
bool rated_in_bytes(const nlohmann::json& step);
/// A step whose rate is said in bytes of use a second (decode: each key and value in use once),
/// against the roof of reading.
bool rated_by_use(const nlohmann::json& step);
/// Useful bytes a second in so many seconds, and their share of that roof in %.
std::string useful_rate(const nlohmann::json& step, double seconds);
std::string share_of_read(const nlohmann::json& step, double seconds);

}  // namespace attn::report
