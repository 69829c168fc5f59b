// The .npy writer: its files equal NumPy's, and failures are reported with a reason.
#include "files/npy.h"

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "tests/catch.h"
#include "tests/npy_files.h"

using attn::NpyArray;
using attn::read_npy;
using attn::write_npy;
using namespace attn::tests;

TEST_CASE("write_npy writes what read_npy reads and what NumPy writes", "[npy]") {
  const TemporaryFolder folder;
  const fs::path path = folder / "written.npy";
  const std::vector<float> data = {1.5f, -0.0f, std::numeric_limits<float>::infinity(), 3.0f,
                                   -4.0f, 5e-40f};
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{6}, {2, 3}, {3, 1, 2}, {1, 1, 1, 1, 1, 1, 1, 6}, {0}, {4, 0, 2}, {}}) {
    write_npy(path, shape, data.data());
    const NpyArray array = read_npy(path);
    CHECK(array.shape == shape);
    std::size_t count = 1;
    for (const int64_t size : shape) count *= static_cast<std::size_t>(size);
    CHECK(array.data == std::vector<float>(data.begin(), data.begin() + static_cast<int>(count)));
    const std::string bytes = bytes_of(path);
    CHECK((bytes.size() - count * sizeof(float)) % 64 == 0);
    CHECK(bytes[bytes.size() - count * sizeof(float) - 1] == '\n');
  }

  for (const char* name : {"rank0", "rank1", "rank2", "rank4", "empty_first", "special"}) {
    INFO(name);
    const NpyArray array = read_npy(fixture(name));
    write_npy(path, array.shape, array.data.data());
    CHECK(bytes_of(path) == bytes_of(fixture(name)));
  }

  write_npy(path, {0, 3}, nullptr);
  CHECK(read_npy(path).data.empty());
}

TEST_CASE("write_npy replaces a longer file whole", "[npy]") {
  const TemporaryFolder folder;
  const fs::path path = folder / "replaced.npy";
  write_bytes(path, std::string(1000, 'x'));
  const float value = 7.0f;
  write_npy(path, {1}, &value);
  CHECK(read_npy(path).data == std::vector<float>{7.0f});
}

TEST_CASE("write_npy says why it cannot write", "[npy]") {
  const TemporaryFolder folder;
  const std::vector<float> data(20000, 1.0f);
  const auto writing_error = [&data](const fs::path& path, const std::vector<int64_t>& shape) {
    try {
      write_npy(path, shape, data.data());
    } catch (const attn::InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto refuses = [](const std::string& message, const fs::path& path, std::string_view what) {
    INFO(message);
    CHECK(contains(message, what));
    CHECK(contains(message, path.string()));
    CHECK_FALSE(contains(message, "\n"));
  };

  const fs::path no_folder = folder / "no_folder/x.npy";
  refuses(writing_error(no_folder, {2}), no_folder, "No such file or directory");
  refuses(writing_error(folder / "", {2}), folder / "", "cannot write");
  // Every write to this device fails with a full disk; for small files only on closing.
  if (fs::exists("/dev/full")) {
    refuses(writing_error("/dev/full", {2}), "/dev/full", "No space left on device");
    refuses(writing_error("/dev/full", {20000}), "/dev/full", "No space left on device");
    CHECK(fs::exists("/dev/full"));
  }

  const fs::path path = folder / "x.npy";
  refuses(writing_error(path, {-1}), path, "shape (-1,)");
  refuses(writing_error(path, {1, 1, 1, 1, 1, 1, 1, 1, 1}), path, "9 dimensions");
  refuses(writing_error(path, {int64_t{1} << 40, int64_t{1} << 40}), path, "2^63 bytes");
  CHECK_THROWS_AS(write_npy(path, {2}, nullptr), attn::InputError);
  CHECK_FALSE(fs::exists(path));
}
