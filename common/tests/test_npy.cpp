// The .npy reader on files written by NumPy, on malformed files, and on good files with every byte
// of the header modified in turn. The writer is tested in test_npy_write.cpp.
#include "files/npy.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/catch.h"
#include "tests/npy_files.h"

namespace {

using attn::NpyArray;
using attn::read_npy;
using namespace attn::tests;

// A version 1.0 file with this header text and data.
std::string npy_bytes(std::string_view header, std::string_view data) {
  std::string bytes("\x93NUMPY\x01\x00", 8);
  bytes += static_cast<char>(header.size() & 0xff);
  bytes += static_cast<char>(header.size() >> 8);
  bytes += header;
  bytes += data;
  return bytes;
}

// The message of the InputError that reading throws, or "" if it throws none.
std::string reading_error(const fs::path& path) {
  try {
    read_npy(path);
  } catch (const attn::InputError& error) {
    return error.what();
  }
  return "";
}

// One line with the fault, its position and the accepted values.
void check_message(const std::string& message, const fs::path& path, std::string_view what) {
  INFO(message);
  CHECK(contains(message, what));
  CHECK(contains(message, path.string()));
  CHECK(contains(message, "accepted: "));
  CHECK(std::all_of(message.begin(), message.end(),
                    [](char c) { return static_cast<unsigned char>(c) >= 0x20; }));
}

bool is_consistent(const NpyArray& array, std::size_t file_size) {
  int64_t count = 1;
  for (const int64_t size : array.shape) count *= size;
  return array.shape.size() <= 8 && count >= 0 &&
         array.data.size() == static_cast<std::size_t>(count) &&
         array.data.size() * sizeof(float) < file_size;
}

// Reads modified bytes: the result must be an InputError of one line or a consistent array.
bool is_handled(const fs::path& path, const std::string& bytes) {
  write_bytes(path, bytes);
  try {
    return is_consistent(read_npy(path), bytes.size());
  } catch (const attn::InputError& error) {
    return !contains(error.what(), "\n");
  }
}

constexpr std::string_view kPlainHeader =
    "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n";
constexpr std::string_view kEightBytes("\0\0\x80\x3f\0\0\0\x40", 8);  // 1.0f, 2.0f

}  // namespace

TEST_CASE("read_npy reads what NumPy wrote", "[npy]") {
  struct Case {
    std::string name;
    std::vector<int64_t> shape;
  };
  const std::vector<Case> cases = {
      {"rank1", {5}},
      {"rank2", {2, 3}},
      {"rank4", {1, 2, 3, 4}},
      {"rank8", {1, 2, 1, 2, 1, 2, 1, 2}},
      {"empty_first", {0, 4}},
      {"empty_last", {3, 0}},
      {"version_2", {2, 3}},
      {"version_3", {2, 3}},
      {"column", {5, 1}},
  };
  for (const auto& [name, shape] : cases) {
    INFO(name);
    const NpyArray array = read_npy(fixture(name));
    CHECK(array.shape == shape);
    std::size_t count = 1;
    for (const int64_t size : shape) count *= static_cast<std::size_t>(size);
    REQUIRE(array.data.size() == count);
    for (std::size_t i = 0; i < count; ++i) {
      CHECK(array.data[i] == 0.5f * static_cast<float>(i));
    }
  }
}

TEST_CASE("read_npy reads a single number as rank 0", "[npy]") {
  const NpyArray array = read_npy(fixture("rank0"));
  CHECK(array.shape.empty());
  REQUIRE(array.data.size() == 1);
  CHECK(array.data[0] == 2.5f);
}

TEST_CASE("read_npy keeps the bits of zeros, infinities, NaNs and subnormals", "[npy]") {
  const NpyArray array = read_npy(fixture("special"));
  const std::vector<uint32_t> expected = {0x00000000, 0x80000000, 0x7f800000, 0xff800000,
                                          0x7fc00000, 0x00000001, 0x7f7fffff};
  REQUIRE(array.data.size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    CHECK(std::bit_cast<uint32_t>(array.data[i]) == expected[i]);
  }
}

TEST_CASE("read_npy refuses other arrays that NumPy writes and says what to do", "[npy]") {
  struct Case {
    std::string descr, fortran_order, shape;  // as in NumPy's header
    std::size_t bytes;
    std::string what;
  };
  const std::vector<Case> cases = {
      {"'<f4'", "True", "(2, 3)", 24, "Fortran order: convert with np.ascontiguousarray"},
      {"'>f4'", "False", "(2, 3)", 24, "big-endian float32: convert with .astype('<f4')"},
      {"'<f4'", "False", "(1, 1, 1, 1, 1, 1, 1, 1, 1)", 4, "9 dimensions"},
      {"'<f8'", "False", "(2, 3)", 48, "float64: convert with .astype(np.float32)"},
      {"'<f2'", "False", "(2, 3)", 12,
       "float16: convert with .astype(np.float32), or compute in fp16 (--dtype fp16)"},
      {"'<i4'", "False", "(2, 3)", 24, "int32: convert with .astype(np.float32)"},
      {"'|u1'", "False", "(2, 3)", 6, "uint8: convert with .astype(np.float32)"},
      {"'|b1'", "False", "(2, 3)", 6, "bool: convert with .astype(np.float32)"},
      {"'<c8'", "False", "(2, 3)", 48, "complex64: not a real number type"},
      {"'<U3'", "False", "(2,)", 24, "unknown dtype '<U3'"},
      {"'|V2'", "False", "(4,)", 8,
       "raw 16-bit values '|V2', as bfloat16 is saved: convert with "
       ".astype(np.float32) before np.save"},
      {"[('x', '<f4'), ('y', '<f4', (2,))]", "False", "(2,)", 24, "structured dtype"},
  };
  const TemporaryFolder folder;
  const fs::path path = folder / "refused.npy";
  for (const auto& [descr, fortran_order, shape, bytes, what] : cases) {
    write_bytes(path, npy_bytes("{'descr': " + descr + ", 'fortran_order': " + fortran_order +
                                    ", 'shape': " + shape + ", }\n",
                                std::string(bytes, '\0')));
    check_message(reading_error(path), path, what);
  }
}

TEST_CASE("read_npy refuses what is not a file", "[npy]") {
  const TemporaryFolder folder;
  const auto refuses = [](const fs::path& path, std::string_view what) {
    check_message(reading_error(path), path, what);
  };
  refuses(folder / "missing.npy", "no such file");
  refuses(folder / "no_folder/missing.npy", "no such file");
  refuses(folder / "", "a directory");
  if (fs::exists("/dev/zero")) refuses("/dev/zero", "not a regular file");

  const fs::path odd_name = folder / "two\nlines.npy";
  CHECK_FALSE(contains(reading_error(odd_name), "\n"));
}

TEST_CASE("read_npy refuses broken files", "[npy]") {
  const TemporaryFolder folder;
  const fs::path path = folder / "broken.npy";
  const auto refuses = [&path](std::string_view bytes, std::string_view what) {
    write_bytes(path, bytes);
    check_message(reading_error(path), path, what);
  };
  const std::string good = npy_bytes(kPlainHeader, kEightBytes);
  write_bytes(path, good);
  REQUIRE(reading_error(path).empty());

  SECTION("prefix") {
    refuses("", "an empty file");
    refuses("PK\x03\x04 a zip file, as .npz is", "not a .npy file");
    refuses("{", "not a .npy file");
    refuses(std::string_view(good).substr(0, 3), "truncated inside the magic number");
    refuses(std::string_view(good).substr(0, 9), "truncated inside the header length");
    std::string bytes = good;
    bytes[6] = 4;
    refuses(bytes, "version 4.0");
    bytes[6] = 0;
    refuses(bytes, "version 0.0");
    bytes[6] = 1;
    bytes[7] = 1;
    refuses(bytes, "version 1.1");
  }
  SECTION("header length") {
    refuses(std::string_view(good).substr(0, 40), "truncated header (30 of 58 bytes)");
    std::string bytes = good;
    bytes[6] = 2;  // a 4-byte length whose last two bytes are "{'"
    refuses(bytes, "absurd header length");
    refuses(std::string_view("\x93NUMPY\x03\x00\xff\xff\xff\xff{}", 14),
            "absurd header length of 4294967295 bytes");
    refuses(std::string_view("\x93NUMPY\x01\x00\x00\x00", 10), "its header is not NumPy's");
  }
  SECTION("data") {
    refuses(npy_bytes(kPlainHeader, kEightBytes.substr(0, 7)),
            "truncated data: shape (2,) takes 8 bytes and the file holds 7");
    refuses(npy_bytes(kPlainHeader, ""), "truncated data");
    refuses(good + '\0', "trailing bytes: shape (2,) takes 8 bytes and the file holds 9");
    refuses(npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (0,)}", kEightBytes),
            "trailing bytes");
  }
  SECTION("shape") {
    const auto with_shape = [](std::string_view shape) {
      return npy_bytes(
          "{'descr': '<f4', 'fortran_order': False, 'shape': " + std::string(shape) + "}\n",
          kEightBytes);
    };
    // None of these sizes may be allocated: the file is smaller.
    refuses(with_shape("(1099511627776,)"), "truncated data");
    refuses(with_shape("(2305843009213693951,)"), "truncated data");  // 2^61 - 1: fits 63 bits
    refuses(with_shape("(2305843009213693952,)"), "more than 63 bits");
    refuses(with_shape("(4294967296, 4294967296)"), "more than 63 bits");
    refuses(with_shape("(4294967296, 4294967296, 0)"), "more than 63 bits");
    refuses(with_shape("(0, 9223372036854775807, 3)"), "more than 63 bits");
    refuses(with_shape("(9223372036854775808,)"), "a number of more than 63 bits");
    refuses(with_shape("(99999999999999999999999999,)"), "a number of more than 63 bits");
    refuses(with_shape("(-2,)"), "not a size");
    refuses(with_shape("(-1, -2)"), "not a size");
    refuses(with_shape("(2.0,)"), "not NumPy's");
    refuses(with_shape("('2',)"), "not a size");
    refuses(with_shape("((2,),)"), "not a size");
    refuses(with_shape("(None,)"), "not a size");
    refuses(with_shape("2"), "'shape' in its header is not a tuple");
    refuses(with_shape("(2)"), "'shape' in its header is not a tuple");
    refuses(with_shape("[2]"), "'shape' in its header is not a tuple");
    refuses(with_shape("(,)"), "not NumPy's");
    refuses(with_shape("(2,,)"), "not NumPy's");
    refuses(with_shape("(2 3)"), "not NumPy's");
    refuses(with_shape("(2,"), "not NumPy's");
    refuses(with_shape("(1, 1, 1, 1, 1, 1, 1, 1, 2)"), "9 dimensions");
  }
  SECTION("dict") {
    const auto refuses_header = [&refuses](std::string_view header, std::string_view what) {
      refuses(npy_bytes(header, kEightBytes), what);
    };
    refuses_header("{}", "no 'descr'");
    refuses_header("{'descr': '<f4', 'shape': (2,)}", "no 'fortran_order'");
    refuses_header("{'descr': '<f4', 'fortran_order': False}", "no 'shape'");
    refuses_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'extra': 1}",
                   "unknown key 'extra'");
    refuses_header("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,)}",
                   "key 'descr' twice");
    refuses_header("{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}", "neither True nor False");
    refuses_header("{'descr': 4, 'fortran_order': False, 'shape': (2,)}", "not a dtype");
    refuses_header("{'descr': '', 'fortran_order': False, 'shape': (2,)}", "unknown dtype ''");
    refuses_header("{'descr': '<float32', 'fortran_order': False, 'shape': (2,)}", "unknown dtype");
    refuses_header("{'descr': 'f', 'fortran_order': False, 'shape': (3,)}", "truncated data");
    refuses_header("{'descr': '>f', 'fortran_order': False, 'shape': (2,)}", "big-endian float32");
    refuses_header("{'descr': 'float', 'fortran_order': False, 'shape': (2,)}", "float64: convert");
    refuses_header("{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (2,)}",
                   "not a dtype");
    refuses_header("{'descr': '|O', 'fortran_order': False, 'shape': (2,)}", "unknown dtype '|O'");
    refuses_header("{'descr': 'a\nb\x1b[31m\xc3', 'fortran_order': False, 'shape': (2,)}",
                   "unknown dtype 'a?b?[31m?'");
    refuses_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} x", "after the dict");
    refuses_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)", "not NumPy's");
    refuses_header("{'descr': '<f4, 'fortran_order': False, 'shape': (2,)}", "not NumPy's");
    refuses_header("{'descr': '<f4' 'fortran_order': False, 'shape': (2,)}", "not NumPy's");
    refuses_header("{descr: '<f4', 'fortran_order': False, 'shape': (2,)}", "not NumPy's");
    refuses_header("{1: '<f4', 'fortran_order': False, 'shape': (2,)}", "not a string");
    refuses_header("{'descr': '<f4', 'fortran_order': false, 'shape': (2,)}", "not NumPy's");
    refuses_header("{'descr': '\\", "not NumPy's");
    refuses_header("{'descr': __import__('os'), 'shape': (2,)}", "not NumPy's");
    refuses_header("'descr' '<f4' 'fortran_order' False 'shape' (2,)", "not NumPy's");
    refuses_header("                ", "not NumPy's");
    refuses_header("{'descr': " + std::string(60000, '('), "too many brackets");
    refuses_header("{'descr': " + std::string(60000, '['), "too many brackets");
    // The keys are all present, but inside a string.
    refuses_header("{'descr': \"'<f4', 'fortran_order': False, 'shape': (2,)\"}",
                   "no 'fortran_order'");
  }
}

TEST_CASE("read_npy accepts every spelling of the same header", "[npy]") {
  const TemporaryFolder folder;
  const fs::path path = folder / "spelling.npy";
  for (const std::string_view header : {
           std::string_view("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"),
           std::string_view("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}"),
           std::string_view("{'shape': (2,), 'fortran_order': False, 'descr': '<f4'}\n"),
           std::string_view("{\"shape\":(2,),\"descr\":\"<f4\",\"fortran_order\":False}"),
           std::string_view("  {\n'descr'\t:\r\n '=f4' , 'fortran_order' : False , "
                            "'shape' : ( 2 , ) , }  \n"),
           std::string_view("{'descr': 'f4', 'fortran_order': False, 'shape': (2L,)}"),
           std::string_view("{'descr': 'f', 'fortran_order': False, 'shape': (2,)}"),
           std::string_view("{'descr': '<f', 'fortran_order': False, 'shape': (2,)}"),
           std::string_view("{'descr': '|f4', 'fortran_order': False, 'shape': (2,)}"),
           std::string_view("{'descr': 'float32', 'fortran_order': False, 'shape': (2,)}"),
           std::string_view("{'descr': 'single', 'fortran_order': False, 'shape': (2,)}"),
           std::string_view("{'descr': u'<f4', 'fortran_order': False, 'shape': (2,)}"),
           std::string_view("{'descr': ('<f4', ()), 'fortran_order': False, 'shape': (2,)}"),
           std::string_view("{'descr': '<f4', 'fortran_order': False, 'shape': (+2, )}"),
           std::string_view("{'descr': '<f4', 'fortran_order': True, 'shape': (2,)}"),
       }) {
    INFO(header);
    write_bytes(path, npy_bytes(header, kEightBytes));
    CHECK(reading_error(path).empty());
    const NpyArray array = read_npy(path);
    CHECK(array.shape == std::vector<int64_t>{2});
    CHECK(array.data == std::vector<float>{1.0f, 2.0f});
  }

  // Both orders have the same bytes if at most one size is not 1, or if there are no elements.
  for (const std::string_view shape : {"(1, 2, 1)", "(2, 1)", "(1, 1, 2)"}) {
    INFO(shape);
    write_bytes(path, npy_bytes("{'descr': '<f4', 'fortran_order': True, 'shape': " +
                                    std::string(shape) + "}",
                                kEightBytes));
    CHECK(reading_error(path).empty());
  }
  write_bytes(path, npy_bytes("{'descr': '<f4', 'fortran_order': True, 'shape': (3, 0, 2)}", ""));
  CHECK(read_npy(path).shape == std::vector<int64_t>{3, 0, 2});
}

TEST_CASE("read_npy survives every truncation of a good file", "[npy]") {
  const TemporaryFolder folder;
  const fs::path path = folder / "truncated.npy";
  for (const char* name : {"rank0", "rank2", "rank8", "empty_first", "version_2", "version_3"}) {
    const std::string good = bytes_of(fixture(name));
    for (std::size_t size = 0; size < good.size(); ++size) {
      INFO(name << " cut to " << size << " bytes");
      write_bytes(path, std::string_view(good).substr(0, size));
      REQUIRE_FALSE(reading_error(path).empty());
    }
  }
}

TEST_CASE("read_npy survives every header byte being another", "[npy]") {
  const TemporaryFolder folder;
  const fs::path path = folder / "spoilt.npy";
  for (const char* name : {"rank0", "rank2", "version_3"}) {
    const std::string good = bytes_of(fixture(name));
    for (std::size_t i = 0; i < std::min<std::size_t>(good.size(), 128); ++i) {
      for (const int value : {0x00, 0x01, 0x02, 0x0a, 0x20, 0x27, 0x28, 0x29, 0x2c, 0x2d, 0x30,
                              0x39, 0x4c, 0x5b, 0x5c, 0x7b, 0x7d, 0x7f, 0x80, 0xff}) {
        INFO(name << ", byte " << i << " set to " << value);
        std::string bytes = good;
        bytes[i] = static_cast<char>(value);
        REQUIRE(is_handled(path, bytes));
      }
      for (int bit = 0; bit < 8; ++bit) {
        INFO(name << ", byte " << i << ", bit " << bit << " flipped");
        std::string bytes = good;
        bytes[i] = static_cast<char>(static_cast<unsigned char>(bytes[i]) ^ (1u << bit));
        REQUIRE(is_handled(path, bytes));
      }
    }
  }
}

TEST_CASE("read_npy survives random edits", "[npy]") {
  const TemporaryFolder folder;
  const fs::path path = folder / "edited.npy";
  std::mt19937 random(20240607);
  const auto below = [&random](std::size_t n) {
    return std::uniform_int_distribution<std::size_t>(0, n - 1)(random);
  };
  const std::string_view alphabet = "{}()[]',:\" \n\\-+0123456789LTrueFalsNone<>=|f48\x80\xff";
  const std::string good = bytes_of(fixture("rank4"));
  for (int round = 0; round < 4000; ++round) {
    std::string bytes = good;
    for (std::size_t edits = 1 + below(6); edits > 0; --edits) {
      const std::size_t at = 8 + below(80);
      switch (below(4)) {
        case 0: bytes[at] = alphabet[below(alphabet.size())]; break;
        case 1: bytes.erase(at, 1 + below(8)); break;
        case 2: bytes.insert(at, 1, alphabet[below(alphabet.size())]); break;
        default: std::swap(bytes[at], bytes[8 + below(80)]); break;
      }
    }
    INFO("round " << round);
    REQUIRE(is_handled(path, bytes));
  }
}
