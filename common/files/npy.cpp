// The .npy format, as NumPy documents it in numpy.lib.format:
//
//   offset 0   "\x93NUMPY"                    magic
//          6   major, minor                   1.0, 2.0 or 3.0
//          8   header length                  2 bytes in 1.0, 4 bytes in 2.0 and 3.0, little-endian
//    10 or 12  header                         a Python dict, padded with spaces, ended by '\n':
//              {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
//              data                           product(shape) values
//
// The header is text from outside, so it is parsed as a Python literal and not searched for words:
// the keys come in any order, and a name inside a string is not a key.
#include "files/npy.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>

#include "files/npy_literal.h"

namespace attn {
namespace {

namespace fs = std::filesystem;
using npy::HeaderParser, npy::ParseError, npy::Value, npy::in_quotes, npy::printable;

static_assert(std::endian::native == std::endian::little,
              "values are copied between memory and the file as they are, so the host must be "
              "little-endian");
static_assert(sizeof(float) == 4 && std::numeric_limits<float>::is_iec559,
              "float must be IEEE binary32");

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kMaxRank = 8;
// A float32 header of 8 dimensions needs about 250 bytes. The limit leaves room for structured
// types, which get an explanation of their own, and keeps a corrupt length from allocating much
// memory.
constexpr std::uint64_t kMaxHeaderBytes = 1 << 20;
constexpr std::size_t kHeaderAlignment = 64;

// The types that a caller accepts: type codes such as "<f4", and their names for messages.
using Types = std::vector<std::string_view>;

// A NumPy type: its code without the byte order, its name, and its other spellings, all of which
// numpy.dtype() and np.load accept.
struct NumpyType {
  std::string_view code, name;
  std::array<std::string_view, 8> spellings = {};
};
constexpr NumpyType kNumpyTypes[] = {
    {"f2", "float16", {"e", "half"}},
    {"f4", "float32", {"f", "single"}},
    {"f8", "float64", {"d", "float", "double", "float_"}},
    {"f16", "float128", {"g", "longdouble", "longfloat"}},
    {"i1", "int8", {"b", "byte"}},
    {"i2", "int16", {"h", "short"}},
    {"i4", "int32", {"i", "intc"}},
    {"i8", "int64", {"l", "q", "p", "int", "int_", "long", "longlong", "intp"}},
    {"u1", "uint8", {"B", "ubyte"}},
    {"u2", "uint16", {"H", "ushort"}},
    {"u4", "uint32", {"I", "uintc"}},
    {"u8", "uint64", {"L", "Q", "P", "uint", "ulong", "ulonglong", "uintp"}},
    {"b1", "bool", {"?", "bool_", "bool8"}},
    {"c8", "complex64", {"F", "csingle", "singlecomplex"}},
    {"c16", "complex128", {"D", "complex", "cdouble", "complex_"}},
};

// The type that `text`, without its byte order, spells; nullptr if it is none of these. As in
// NumPy, "f04" is "f4" and one comma at the end is ignored.
const NumpyType* numpy_type(std::string text) {
  if (text.ends_with(',')) text.pop_back();
  while (text.size() > 2 && std::isalpha(static_cast<unsigned char>(text[0])) && text[1] == '0')
    text.erase(1, 1);
  for (const NumpyType& type : kNumpyTypes)
    if (text == type.code || text == type.name ||
        (!text.empty() && std::ranges::find(type.spellings, text) != type.spellings.end()))
      return &type;
  return nullptr;
}
std::string_view dtype_name(std::string_view code) {
  const NumpyType* const type = numpy_type(std::string(code));
  return type ? type->name : std::string_view();
}

// A file to read, with its accepted contents for messages.
struct Wanted {
  const fs::path& path;
  const Types& types;
  std::string_view name() const { return dtype_name(types.front().substr(1)); }
};

[[noreturn]] void fail(const Wanted& file, std::string_view what) {
  std::string names;
  for (const std::string_view type : file.types)
    names += (names.empty() ? "" : " or ") + std::string(dtype_name(type.substr(1)));
  throw InputError(printable(file.path.string(), 4096) + ": " + std::string(what) +
                   "; accepted: a .npy file (version 1.0, 2.0 or 3.0) of little-endian " + names +
                   " in C order, at most 8 dimensions");
}

[[noreturn]] void fail_to_write(const fs::path& path, std::string_view what) {
  throw InputError("cannot write " + printable(path.string(), 4096) + ": " + std::string(what));
}

std::string system_message(int error, std::string_view otherwise) {
  return error != 0 ? std::generic_category().message(error) : std::string(otherwise);
}

// ---- What the header means -------------------------------------------------------------------

// The accepted type that `descr` names, in this machine's byte order; throws for any other.
std::string_view checked_type(const Wanted& path, const Value& given) {
  // ('<f4', ()) is '<f4': a sub-array type without dimensions.
  const bool no_dimensions = given.kind == Value::Kind::kTuple && given.items.size() == 2 &&
                             given.items[1].kind == Value::Kind::kTuple &&
                             given.items[1].items.empty();
  const Value& descr = no_dimensions ? given.items[0] : given;
  if (descr.kind == Value::Kind::kList) {
    fail(path, "a structured dtype: save each field as a " + std::string(path.name()) +
                   " array of its own");
  }
  if (descr.kind != Value::Kind::kString) fail(path, "'descr' in its header is not a dtype");
  std::string_view text = descr.text;
  char order = '=';
  if (!text.empty() && std::string_view("<>=|").find(text.front()) != std::string_view::npos) {
    order = text.front();
    text.remove_prefix(1);
  }
  const NumpyType* const found = numpy_type(std::string(text));
  // Codes may have a byte order prefix, names may not: numpy.dtype('<float32') is an error.
  if (found == nullptr ||
      (text.size() != descr.text.size() && text.size() > 1 && text == found->name)) {
    if (text == "V2")
      fail(path, "raw 16-bit values " + in_quotes(descr.text) +
                     ", as bfloat16 is saved: convert with .astype(np." + std::string(path.name()) +
                     ") before np.save");
    fail(path, "unknown dtype " + in_quotes(descr.text));
  }
  for (const std::string_view type : path.types) {
    if (found->code != type.substr(1)) continue;
    if (order == '>' && found->code.back() != '1')
      fail(path, "big-endian " + std::string(found->name) + ": convert with .astype('" +
                     std::string(type) + "')");
    return type;
  }
  if (found->name.starts_with("complex"))
    fail(path, std::string(found->name) + ": not a real number type");
  fail(path, std::string(found->name) + ": convert with .astype(np." + std::string(path.name()) +
                 ")" + (found->code == "f2" ? ", or compute in fp16 (--dtype fp16)" : ""));
}

// Bytes of one value of a type such as "<f4".
int64_t bytes_of_value(std::string_view type) { return type.back() - '0'; }

// The number of values in `shape`, or nothing if a size or the number of bytes exceeds 63 bits. A
// size of 0 does not excuse the others: NumPy refuses such a shape too, and strides are computed
// from it.
std::optional<int64_t> checked_count(const std::vector<int64_t>& shape, std::string_view type) {
  const int64_t most_values = std::numeric_limits<int64_t>::max() / bytes_of_value(type);
  int64_t nonzero_product = 1;
  bool empty = false;
  for (const int64_t size : shape) {
    if (size == 0) {
      empty = true;
    } else if (nonzero_product > most_values / size) {
      return std::nullopt;
    } else {
      nonzero_product *= size;
    }
  }
  return empty ? 0 : nonzero_product;
}

// "(2, 3)", "(5,)" or "()": a Python tuple.
std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::vector<int64_t> parse_shape(const Wanted& path, const Value& value) {
  if (value.kind != Value::Kind::kTuple) fail(path, "'shape' in its header is not a tuple");
  if (value.items.size() > kMaxRank) {
    fail(path, std::to_string(value.items.size()) + " dimensions");
  }
  std::vector<int64_t> shape;
  for (const Value& item : value.items) {
    if (item.kind != Value::Kind::kInteger || item.number < 0) {
      fail(path, "'shape' in its header holds something that is not a size");
    }
    shape.push_back(item.number);
  }
  return shape;
}

// Parses the header text and checks everything that does not need the data. Returns shape and type.
std::pair<std::vector<int64_t>, std::string_view> parse_header(const Wanted& path,
                                                               std::string_view text) {
  std::vector<std::pair<std::string, Value>> dict;
  try {
    dict = HeaderParser(text).parse_dict();
  } catch (const ParseError& error) {
    fail(path, std::string("its header is not NumPy's: ") + error.what());
  }

  const Value* descr = nullptr;
  const Value* fortran_order = nullptr;
  const Value* shape_value = nullptr;
  for (const auto& [key, value] : dict) {
    const Value** slot = key == "descr"           ? &descr
                         : key == "fortran_order" ? &fortran_order
                         : key == "shape"         ? &shape_value
                                                  : nullptr;
    if (slot == nullptr) fail(path, "unknown key " + in_quotes(key) + " in its header");
    if (*slot != nullptr) fail(path, "key " + in_quotes(key) + " twice in its header");
    *slot = &value;
  }
  if (descr == nullptr) fail(path, "no 'descr' in its header");
  if (fortran_order == nullptr) fail(path, "no 'fortran_order' in its header");
  if (shape_value == nullptr) fail(path, "no 'shape' in its header");

  const std::string_view type = checked_type(path, *descr);
  std::vector<int64_t> shape = parse_shape(path, *shape_value);
  if (fortran_order->kind != Value::Kind::kBool) {
    fail(path, "'fortran_order' in its header is neither True nor False");
  }
  if (fortran_order->truth) {
    // With at most one size other than 1, or with a size of 0, both orders have the same bytes.
    int wide = 0;
    bool empty = false;
    for (const int64_t size : shape) {
      wide += size != 1 ? 1 : 0;
      empty = empty || size == 0;
    }
    if (wide > 1 && !empty) fail(path, "Fortran order: convert with np.ascontiguousarray(x)");
  }
  return {std::move(shape), type};
}

// Opens a regular file and returns its size in bytes.
std::uint64_t open_for_reading(const Wanted& wanted, std::ifstream& file) {
  const fs::path& path = wanted.path;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) fail(wanted, "no such file");
  if (status.type() == fs::file_type::none) fail(wanted, "cannot open: " + error.message());
  if (status.type() == fs::file_type::directory) fail(wanted, "a directory, not a file");
  // Pipes and devices have no size in advance, and the checks need the size.
  if (status.type() != fs::file_type::regular) fail(wanted, "not a regular file");
  const std::uintmax_t size = fs::file_size(path, error);
  if (error) fail(wanted, "cannot open: " + error.message());
  errno = 0;
  file.open(path, std::ios::binary);
  if (!file) fail(wanted, "cannot open: " + system_message(errno, "unknown reason"));
  return size;
}

// Reads exactly `size` bytes; false at an early end.
bool read_exactly(std::ifstream& file, char* to, std::uint64_t size) {
  file.read(to, static_cast<std::streamsize>(size));
  return static_cast<std::uint64_t>(file.gcount()) == size;
}

}  // namespace

NpyArray read_npy(const std::filesystem::path& path) {
  const NpyBytes raw = read_npy_bytes(path, {"<f4"});
  NpyArray array{raw.shape, std::vector<float>(raw.bytes.size() / sizeof(float))};
  if (!raw.bytes.empty()) std::memcpy(array.data.data(), raw.bytes.data(), raw.bytes.size());
  return array;
}

namespace {
// A file after its header has been read, positioned at its data.
struct Opened {
  std::ifstream file;
  std::vector<int64_t> shape;
  std::string_view type;
  std::uint64_t data_bytes = 0;
};
Opened open_npy(const Wanted& path) {
  Opened array;
  std::ifstream& file = array.file;
  const std::uint64_t file_size = open_for_reading(path, file);
  if (file_size == 0) fail(path, "an empty file");

  std::array<unsigned char, 12> prefix{};
  char* const prefix_bytes = reinterpret_cast<char*>(prefix.data());
  constexpr std::uint64_t kFixedBytes = kMagic.size() + 2;  // magic and version
  const std::uint64_t bytes_there = std::min(kFixedBytes, file_size);
  const std::string_view magic_there = kMagic.substr(0, bytes_there);
  if (!read_exactly(file, prefix_bytes, bytes_there) ||
      std::string_view(prefix_bytes, magic_there.size()) != magic_there) {
    fail(path, "not a .npy file (its first bytes are not \\x93NUMPY)");
  }
  if (file_size < kFixedBytes) fail(path, "truncated inside the magic number and version");
  const unsigned major = prefix[6];
  const unsigned minor = prefix[7];
  if (major < 1 || major > 3 || minor != 0) {
    fail(path, ".npy format version " + std::to_string(major) + "." + std::to_string(minor));
  }

  const std::uint64_t length_bytes = major == 1 ? 2 : 4;
  const std::uint64_t header_begin = kFixedBytes + length_bytes;
  if (file_size < header_begin || !read_exactly(file, prefix_bytes + kFixedBytes, length_bytes)) {
    fail(path, "truncated inside the header length");
  }
  std::uint64_t header_size = 0;
  for (std::uint64_t i = length_bytes; i-- > 0;) {
    header_size = header_size << 8 | prefix[kFixedBytes + i];
  }
  if (header_size > kMaxHeaderBytes) {
    fail(path, "absurd header length of " + std::to_string(header_size) + " bytes");
  }
  if (header_size > file_size - header_begin) {
    fail(path, "truncated header (" + std::to_string(file_size - header_begin) + " of " +
                   std::to_string(header_size) + " bytes)");
  }
  std::string header(header_size, '\0');
  if (!read_exactly(file, header.data(), header_size)) fail(path, "truncated header");

  std::tie(array.shape, array.type) = parse_header(path, header);
  const std::optional<int64_t> count = checked_count(array.shape, array.type);
  if (!count) fail(path, "shape " + shape_text(array.shape) + " needs more than 63 bits of bytes");
  const std::uint64_t data_bytes = static_cast<std::uint64_t>(*count * bytes_of_value(array.type));
  const std::uint64_t bytes_left = file_size - header_begin - header_size;
  if (data_bytes != bytes_left) {
    fail(path, (data_bytes > bytes_left ? "truncated data: " : "trailing bytes: ") +
                   ("shape " + shape_text(array.shape)) + " takes " + std::to_string(data_bytes) +
                   " bytes and the file holds " + std::to_string(bytes_left));
  }
  array.data_bytes = data_bytes;
  return array;
}
}  // namespace

std::vector<int64_t> read_npy_shape(const std::filesystem::path& npy_path,
                                    const std::vector<std::string_view>& accepted) {
  return open_npy({npy_path, accepted}).shape;
}

NpyBytes read_npy_bytes(const std::filesystem::path& npy_path,
                        const std::vector<std::string_view>& accepted) {
  const Wanted path{npy_path, accepted};
  Opened opened = open_npy(path);
  NpyBytes array{std::move(opened.shape), std::string(opened.type), {}};
  const std::uint64_t data_bytes = opened.data_bytes;
  try {
    array.bytes.resize(static_cast<std::size_t>(data_bytes));
  } catch (const std::exception&) {  // bad_alloc, length_error
    fail(path, "not enough memory for its " + std::to_string(data_bytes) + " bytes");
  }
  if (!read_exactly(opened.file, reinterpret_cast<char*>(array.bytes.data()), data_bytes)) {
    fail(path, "cannot read its data whole");
  }
  return array;
}

void write_npy(const std::filesystem::path& path, const std::vector<int64_t>& shape,
               const float* data) {
  write_npy_bytes(path, shape, "<f4", data);
}

void write_npy_bytes(const std::filesystem::path& path, const std::vector<int64_t>& shape,
                     std::string_view type, const void* data) {
  if (shape.size() > kMaxRank) {
    fail_to_write(path, std::to_string(shape.size()) + " dimensions; accepted: at most 8");
  }
  for (const int64_t size : shape) {
    if (size < 0) fail_to_write(path, "shape " + shape_text(shape) + "; accepted: sizes >= 0");
  }
  const std::optional<int64_t> count = checked_count(shape, type);
  if (!count) {
    fail_to_write(path, "shape " + shape_text(shape) + "; accepted: less than 2^63 bytes");
  }
  if (*count > 0 && data == nullptr) fail_to_write(path, "no data for " + shape_text(shape));

  std::string header = "{'descr': '" + std::string(type) +
                       "', 'fortran_order': False, 'shape': " + shape_text(shape) + ", }";
  const std::size_t prefix_bytes = kMagic.size() + 2 + 2;
  const std::size_t unpadded = prefix_bytes + header.size() + 1;  // 1: the newline
  header.append((kHeaderAlignment - unpadded % kHeaderAlignment) % kHeaderAlignment, ' ');
  header += '\n';

  std::string prefix(kMagic);
  prefix += '\x01';
  prefix += '\x00';
  prefix += static_cast<char>(header.size() & 0xff);
  prefix += static_cast<char>(header.size() >> 8);

  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  if (!file) fail_to_write(path, system_message(errno, "unknown reason"));
  file << prefix << header;
  file.write(static_cast<const char*>(data),
             static_cast<std::streamsize>(*count * bytes_of_value(type)));
  file.close();  // flushes the buffer, so a full disk may be detected only here
  if (!file) {
    const std::string reason = system_message(errno, "it could not be written whole");
    std::error_code ignored;
    if (fs::is_regular_file(path, ignored)) fs::remove(path, ignored);
    fail_to_write(path, reason);
  }
}

}  // namespace attn
