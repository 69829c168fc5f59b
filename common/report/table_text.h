/// \file
/// Shared by the kinds of tables: reading a report, formatting figures, Markdown tables.
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "attn/error.h"

namespace attn::report {

/// A report named by a marker does not exist: not measured yet.
struct NotMeasured : InputError {
  using InputError::InputError;
};

/// `path` if the file exists, also as a document in a container. Throws NotMeasured.
const std::filesystem::path& existing(const std::filesystem::path& path);
/// Throws NotMeasured, or InputError if the file is not a JSON object.
nlohmann::json read_json(const std::filesystem::path&);

/// A table whose rows may lack cells. Columns have a key in addition to their title, since titles
/// can be equal: "x flash" of one step and of the next.
class Grid {
 public:
  void add_row() { rows_.emplace_back(); }
  void add_column(const std::string& key, const std::string& title);
  /// Adds a cell to the last row.
  void put(const std::string& key, std::string cell) { rows_.back()[key] = std::move(cell); }
  void add(const std::string& key, const std::string& title, std::string cell) {
    add_column(key, title);
    put(key, std::move(cell));
  }
  bool empty() const { return rows_.empty(); }
  /// "-" for missing cells. Columns of figures are right-aligned.
  std::string markdown() const;

 private:
  std::vector<std::pair<std::string, std::string>> columns_;  // key, title
  std::vector<std::map<std::string, std::string>> rows_;
};

/// The words between separators: "a,b".
std::vector<std::string> split(const std::string& text, char separator);
std::string milliseconds(double s);
/// TFLOP/s, without the unit.
std::string rate(double flop_per_s);
/// GB, and GB/s, without the unit.
std::string gigabytes(double bytes);
std::string gigabytes_per_s(double bytes_per_s);
std::string code(const std::string& name);  ///< "`v1_global`"

/// "B=4 Hq=16 Hkv=16 N=4096 d=128 bf16 causal"; for operations on rows "8192 rows x 65536 columns
/// bf16".
std::string problem_text(const nlohmann::json& problem);
/// Whether the problem consists of rows of scores only. In older files without this field, those
/// have no head dim.
bool is_matrix(const nlohmann::json& problem);
/// The measured copy rate; 0 if it was not measured.
double measured_copy(const nlohmann::json& roofs);
/// Whether a step's rate is given in bytes per second: its operation counts no arithmetic.
bool rated_in_bytes(const nlohmann::json& step);
/// Whether a step's rate is given in useful bytes per second (decode: each key and value in use
/// once), compared with the read roof.
bool rated_by_use(const nlohmann::json& step);
/// Useful bytes per second, and their share of that roof in %.
std::string useful_rate(const nlohmann::json& step, double seconds);
std::string share_of_read(const nlohmann::json& step, double seconds);

}  // namespace attn::report
