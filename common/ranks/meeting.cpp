#include "ranks/meeting.h"

#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "device/device.h"

namespace attn::ranks {
namespace {

namespace fs = std::filesystem;
constexpr const char* kTitle = "attention ranks 1";

std::string hex(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return text;
}

}  // namespace

void invite(const std::string& file, const Invitation& of) {
  std::error_code error;
  if (fs::exists(file, error))
    throw DeviceError(fmt::format("--nccl-id {}: exists: of another run? Remove it", file));
  const std::string part = file + ".part";
  std::ofstream out(part);
  out << kTitle << "\nworld " << of.world << "\nversion " << of.version << "\nid " << hex(of.id)
      << "\nrun " << of.run << '\n';
  out.close();
  if (out) fs::rename(part, file, error);
  if (!out || error) throw DeviceError(fmt::format("--nccl-id {}: cannot be written", file));
}

Invitation accept(const std::string& file, int rank, const Invitation& mine, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  std::error_code error;
  while (!fs::exists(file, error)) {
    if (Clock::now() > deadline)
      throw DeviceError(fmt::format("time-out of {:g} s: rank {} waits for --nccl-id {} of rank 0",
                                    seconds, rank, file));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  std::ifstream in(file);
  std::string title, word[4], id;
  Invitation of;
  std::getline(in, title);
  in >> word[0] >> of.world >> word[1] >> of.version >> word[2] >> id >> word[3] >> std::ws;
  std::getline(in, of.run);
  if (title != kTitle || word[0] != "world" || word[1] != "version" || word[2] != "id" ||
      word[3] != "run" || id.size() % 2 != 0 || id.find_first_not_of("0123456789abcdef") != id.npos)
    throw DeviceError(fmt::format("--nccl-id {}: not a file of rank 0", file));
  for (std::size_t n = 0; n < id.size(); n += 2)
    of.id += static_cast<char>(std::stoi(id.substr(n, 2), nullptr, 16));
  if (of.world != mine.world)
    throw DeviceError(fmt::format("--world {}: rank 0 of {} has {}", mine.world, file, of.world));
  if (of.version != mine.version)
    throw DeviceError(fmt::format("--nccl-id {}: rank 0 has NCCL {}, rank {} has {}", file,
                                  of.version, rank, mine.version));
  if (of.run != mine.run)
    throw DeviceError(
        fmt::format("--nccl-id {}: rank 0 computes {}, rank {} {}", file, of.run, rank, mine.run));
  return of;
}

}  // namespace attn::ranks
