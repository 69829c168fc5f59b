/// \file
/// Shared by evidence.cpp and evidence_state.cpp: the part, chapter and step of a line, and the
/// lines of parts.jsonl.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "report/containers.h"
#include "report/evidence.h"

namespace attn::report {

inline constexpr const char *kParts = "parts.jsonl", *kUnknown = "unknown";
// Third-party measurements: no run of ours passed. Notes written by hand: they have no keys.
inline constexpr const char *kOthers = "others", *kTried = "tried";

/// "times 04_flash_v2", and the inverse.
std::string name_of(const Unit&);
Unit unit_of(const std::string& name);

/// The chapter of a document or container: "04_flash_v2" for "peers.04_flash_v2.forward".
std::string chapter_of(const std::string& document);
/// The part that wrote a container.
std::string part_of(const std::string& container);
bool is_of(const std::string& container, const Unit&);
/// A document's name in gpu_problems.sh.
std::string listed_name(const std::string& part, const std::string& document);
/// The step of a line of times.
std::string step_of(const nlohmann::json& line);

/// The steps of a log, all marked as launched.
std::map<std::string, bool> steps_of_log(CodeKeys&, const Unit&);

/// The lines of parts.jsonl, by unit.
std::map<std::string, nlohmann::json> read_parts(const std::filesystem::path& folder);

/// Calls take(unit, document, line) for every line of the folder, or of unit `only`; a log has an
/// empty document.
void for_each_line(
    const std::filesystem::path& folder,
    const std::function<void(const Unit&, const std::string&, const nlohmann::json&)>& take,
    const Unit* only = nullptr);

}  // namespace attn::report
