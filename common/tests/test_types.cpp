// 8-bit and 4-bit elements, integers, and their layout in memory and files.
#include <Eigen/Core>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <vector>

#include "attn/error.h"
#include "attn/small_types.h"
#include "check/operation.h"
#include "files/npy.h"
#include "files/tensor_files.h"
#include "tests/catch.h"

using namespace attn;

namespace {

// The value of a code through fp16: e5m2 is its upper byte, and e4m3 has an exponent offset of 8.
float by_half_e5m2(uint8_t code) {
  return float(Eigen::half(Eigen::half_impl::raw_uint16_to_half(uint16_t(code << 8))));
}
float by_half_e4m3(uint8_t code) {
  const auto bits = uint16_t((code & 0x80) << 8 | (code & 0x7F) << 7);
  return 256 * float(Eigen::half(Eigen::half_impl::raw_uint16_to_half(bits)));
}

template <class Type>
void rounds_to_nearest_even(float largest) {
  const auto code_of = [](float x) { return int{Type::encode(x)}; };
  for (int code = 0; Type::decode(uint8_t(code)) < largest; ++code) {
    const float low = Type::decode(uint8_t(code)), high = Type::decode(uint8_t(code + 1)),
                middle = low + (high - low) / 2;
    REQUIRE(low < high);
    const int even = code % 2 == 0 ? code : code + 1;
    for (const int sign : {0, 0x80}) {
      const auto signed_code = [&](float x) { return code_of(sign ? -x : x) - sign; };
      CHECK(signed_code(low) == code);
      CHECK(signed_code(std::nextafter(low, high)) == code);
      CHECK(signed_code(std::nextafter(middle, low)) == code);
      CHECK(signed_code(middle) == even);
      CHECK(signed_code(std::nextafter(middle, high)) == code + 1);
      CHECK(signed_code(std::nextafter(high, low)) == code + 1);
    }
  }
  for (const float x : {largest, std::nextafter(largest, 1e30f), 1.1f * largest, 1e30f, INFINITY}) {
    CHECK(Type::decode(Type::encode(x)) == largest);
    CHECK(Type::decode(Type::encode(-x)) == -largest);
  }
  CHECK(code_of(NAN) == 0x7F);
  CHECK(code_of(-0.0f) == 0x80);
  CHECK(std::isnan(Type::decode(0x7F)));
  CHECK(std::isnan(Type::decode(0xFF)));  // so that poisoned bytes are detected
}

}  // namespace

TEST_CASE("e4m3 and e5m2 mean what their bits say", "[types]") {
  for (int code = 0; code < 256; ++code) {
    const auto bits = uint8_t(code);
    INFO(code);
    if ((code & 0x7F) != 0x7F) CHECK(E4M3::decode(bits) == by_half_e4m3(bits));
    CHECK((E5M2::decode(bits) == by_half_e5m2(bits) || (code & 0x7F) > 0x7C));
    CHECK(std::isnan(E5M2::decode(bits)) == ((code & 0x7F) > 0x7C));
  }
}

TEST_CASE("e4m3 and e5m2 are rounded to nearest even and saturate, at every code", "[types]") {
  rounds_to_nearest_even<E4M3>(448);
  rounds_to_nearest_even<E5M2>(57344);
}

TEST_CASE("int8 and int4 are rounded to nearest even and saturate", "[types]") {
  for (int n = -300; n <= 300; ++n) {
    const int even = n % 2 == 0 ? n : n + 1;
    const auto expected = [](int x, int least, int most) { return std::clamp(x, least, most); };
    for (const auto& [x, rounded] : {std::pair{float(n), n},
                                     {float(n) + 0.5f, even},
                                     {float(n) + 0.25f, n},
                                     {std::nextafter(float(n) + 0.5f, 1e9f), n + 1}}) {
      CHECK(to_int8(x) == expected(rounded, -128, 127));
      CHECK(to_int4(x) == expected(rounded, -8, 7));
      CHECK(round_to(DType::int8, x) == float(to_int8(x)));
      CHECK(round_to(DType::int4, x) == float(to_int4(x)));
    }
  }
  CHECK((to_int8(INFINITY) == 127 && to_int8(-INFINITY) == -128 && to_int4(1e30f) == 7 &&
         to_int4(-INFINITY) == -8));
  CHECK((to_int8(NAN) == 0 && to_int4(NAN) == 0));
}

TEST_CASE("int4 lies two a byte, the first in the low half", "[types]") {
  const float values[] = {1, -2, 7, -8, 5};
  unsigned char bytes[3] = {0xFF, 0xFF, 0xFF};
  encode(DType::int4, values, 5, bytes);
  CHECK((bytes[0] == 0xE1 && bytes[1] == 0x87 && bytes[2] == 0x05));
  float back[5];
  decode(DType::int4, bytes, 5, back);
  CHECK(std::equal(values, values + 5, back));
  CHECK((bits_of(DType::int4) == 4 && bytes_of(DType::int4, 5) == 3 && size_of(DType::e4m3) == 1));
  CHECK_THROWS_AS(size_of(DType::int4), std::logic_error);
  // Large tensors are converted in parts.
  HostTensor t = zeros({"t", {1, 1, 3, 1 << 20}, DType::int4});
  for (std::size_t i = 0; i < t.data.size(); ++i) t.data[i] = float(i * 7 % 16) - 8;
  CHECK(to_bytes(t).size() == t.data.size() / 2);
  CHECK(
      (from_bytes(t.spec, to_bytes(t)).data == t.data));  // avoids printing three million numbers
}

TEST_CASE("index tensors hold integers up to 2^63", "[types]") {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const HostTensor t{
      {"n", {1, 1, 1, 4}, DType::int64}, {}, {kMost, kMost - 1, -kMost, (int64_t{1} << 53) + 1}};
  CHECK(from_bytes(t.spec, to_bytes(t)).numbers == t.numbers);
  const HostTensor u{{"n", {1, 1, 1, 3}, DType::int32}, {}, {2147483647, -1, (1 << 24) + 1}};
  CHECK(from_bytes(u.spec, to_bytes(u)).numbers == u.numbers);
  CHECK((to_bytes(u).size() == 12 && to_bytes(t).size() == 32));
}

TEST_CASE("an element that nobody wrote is known in every type that can say so", "[types]") {
  for (const DType type : {DType::fp32, DType::fp16, DType::bf16, DType::e4m3, DType::e5m2,
                           DType::int32, DType::int64}) {
    INFO(name(type));
    const TensorSpec spec{"t", {1, 1, 2, 8}, type};
    std::vector<std::byte> bytes(static_cast<std::size_t>(spec.bytes()));
    const std::uint32_t pattern = unwritten_bits(type);
    for (std::size_t i = 0; i < bytes.size(); i += 4) std::memcpy(&bytes[i], &pattern, 4);
    const HostTensor t = from_bytes(spec, bytes);
    for (const float x : t.data) CHECK(unwritten(x));
    for (const int64_t n : t.numbers) CHECK(unwritten(type, n));
    CHECK_FALSE(unwritten(round_to(type, NAN)));  // a kernel computes a different NaN
  }
}

namespace {

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const InputError& e) {
    return e.what();
  }
  return "";
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

}  // namespace

TEST_CASE("tensors of every type come back from their files", "[types]") {
  const std::string folder = "types_in_files";
  std::filesystem::remove_all(folder);
  HostTensors tensors;
  std::vector<TensorSpec> specs;
  for (const DType type : {DType::fp32, DType::fp16, DType::bf16, DType::int32, DType::int64,
                           DType::int8, DType::e4m3, DType::e5m2, DType::int4}) {
    HostTensor t = zeros({std::string(name(type)), {2, 1, 3, 4}, type});
    for (std::size_t i = 0; i < t.data.size(); ++i)
      t.data[i] = round_to(type, float(i) * 0.37f - 4);
    for (std::size_t i = 0; i < t.numbers.size(); ++i)
      t.numbers[i] = int64_t(i * 0x0123'4567'89ABull % 0x7FFF'FFFF) - 9;
    if (type == DType::int64) t.numbers[5] = std::numeric_limits<int64_t>::max() - 1;
    specs.push_back(t.spec);
    tensors[t.spec.name] = t;
  }
  save_tensors(folder, tensors);
  Operation op;
  op.inputs = [&](const Problem&) { return specs; };
  Problem p;
  const Inputs back = load_inputs(folder, p, op);
  for (const auto& [name, t] : tensors) {
    INFO(name);
    CHECK(back.tensors.at(name).data == t.data);
    CHECK(back.tensors.at(name).numbers == t.numbers);
  }
  // Types that NumPy has, and bytes with a note for the others.
  const auto type_of = [&](const char* name) {
    const auto path = std::filesystem::path(folder) / (std::string(name) + ".npy");
    return read_npy_bytes(path, {"<f4", "<i4", "<i8", "|i1", "|u1"}).type;
  };
  CHECK((type_of("bf16") == "<f4" && type_of("int32") == "<i4" && type_of("int64") == "<i8" &&
         type_of("int8") == "|i1"));
  for (const char* bytes : {"e4m3", "e5m2", "int4"}) {
    CHECK(type_of(bytes) == "|u1");
    CHECK(std::filesystem::exists(folder + "/" + bytes + ".npy.txt"));
  }
  CHECK(read_npy_bytes(folder + "/int4.npy", {"|u1"}).shape == std::vector<int64_t>{2, 1, 3, 2});
  CHECK_FALSE(std::filesystem::exists(folder + "/int8.npy.txt"));

  // A file of another type is refused by its name.
  specs = {{"bf16", {2, 1, 3, 4}, DType::int32}};
  CHECK(has(message_of([&] { load_inputs(folder, p, op); }),
            "bf16.npy: float32: convert with .astype(np.int32); accepted:"));
  specs = {
      {"int64", {2, 1, 3, 4}, DType::int32}};  // a value that does not fit its type
  CHECK(has(message_of([&] { load_inputs(folder, p, op); }),
            "int64.npy: 9223372036854775806 is not an int32"));
  specs = {{"int8", {2, 1, 3, 4}, DType::e4m3}};
  CHECK(has(message_of([&] { load_inputs(folder, p, op); }),
            "int8.npy: int8: convert with .astype(np.uint8)"));
  std::filesystem::remove_all(folder);
}
