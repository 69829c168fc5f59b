#include "emulator/program.h"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>

#include "emulator/place.h"
#include "emulator/simt.h"

namespace attn::emulator {
namespace {

// The object in memory that holds the kernels: a program or a shared library. The emulator is
// linked into that object (hidden symbols), so any address in this file identifies it.
struct Loaded {
  std::uintptr_t base = 0;
  std::string library;             ///< its file; empty: the program
  std::byte* variables = nullptr;  ///< the calling thread's
  std::size_t bytes = 0;
};
constexpr char kHere = 0;
const Loaded& loaded() {
  // Access to this variable allocates the thread's variables of a library that dlopen has loaded.
  static thread_local const Loaded object = [] {
    Loaded found;
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* out) {
          const auto here = reinterpret_cast<std::uintptr_t>(&kHere) - info->dlpi_addr;
          std::size_t bytes = 0;
          bool holds = false;
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const ElfW(Phdr)& part = info->dlpi_phdr[i];
            if (part.p_type == PT_TLS) bytes = part.p_memsz;
            holds |= part.p_type == PT_LOAD && here - part.p_vaddr < part.p_memsz;
          }
          if (!holds) return 0;
          *static_cast<Loaded*>(out) = {info->dlpi_addr, info->dlpi_name,
                                        static_cast<std::byte*>(info->dlpi_tls_data), bytes};
          return 1;
        },
        &found);
    return found;
  }();
  return object;
}
std::string file_of_object() {
  if (!loaded().library.empty()) return loaded().library;
  return "/proc/" + std::to_string(getpid()) + "/exe";
}

// The symbols of that object's file: functions by address, variables of threads by mangled name.
// Those of anonymous namespaces may be there several times, of several source files.
struct Symbols {
  struct Function {
    std::string name;
    int file;  // 0: the object has one of this name
  };
  struct Variable {
    std::uintptr_t offset;
    std::size_t bytes;
    int file;
  };
  std::multimap<std::uintptr_t, Function> functions;
  std::multimap<std::string, Variable, std::less<>> variables;
  // Of `variables` those of functions, by where they lie: kernels write to variables of threads
  // often.
  std::map<std::uintptr_t, const std::pair<const std::string, Variable>*> local;

  Symbols() {
    const int file = open(file_of_object().c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status {};
    if (file < 0) return;
    if (fstat(file, &status) == 0) {
      void* const map =
          mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, MAP_PRIVATE, file, 0);
      if (map != MAP_FAILED) {
        read(static_cast<const char*>(map));
        munmap(map, static_cast<std::size_t>(status.st_size));
      }
    }
    close(file);
    for (const auto& variable : variables)
      if (variable.first.rfind("_ZZ", 0) == 0) local.emplace(variable.second.offset, &variable);
  }

 private:
  void read(const char* program) {
    const auto& head = *reinterpret_cast<const ElfW(Ehdr)*>(program);
    const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(program + head.e_shoff);
    for (int s = 0; s < head.e_shnum; ++s) {
      if (sections[s].sh_type != SHT_SYMTAB) continue;
      const char* const names = program + sections[sections[s].sh_link].sh_offset;
      int files = 0;
      const auto* symbol = reinterpret_cast<const ElfW(Sym)*>(program + sections[s].sh_offset);
      for (const auto* end = symbol + sections[s].sh_size / sizeof *symbol; symbol < end;
           ++symbol) {
        const int type = symbol->st_info & 0xF;
        if (type == STT_FILE) ++files;  // of the local symbols that follow
        const int file = symbol->st_info >> 4 == STB_LOCAL ? files : 0;
        const char* const name = names + symbol->st_name;
        if (type == STT_FUNC) functions.emplace(symbol->st_value, Function{name, file});
        if (type == STT_TLS)
          variables.emplace(name, Variable{symbol->st_value, symbol->st_size, file});
      }
    }
  }
};
const Symbols& symbols() {
  static const Symbols all;
  return all;
}

// The names of a mangled name's last part: "4tileE" gives "tile".
std::string variable_name(std::string_view mangled) {
  std::size_t digits = 0, length = 0;
  while (digits < mangled.size() && mangled[digits] >= '0' && mangled[digits] <= '9')
    length = length * 10 + static_cast<std::size_t>(mangled[digits++] - '0');
  return std::string(mangled.substr(digits, length));
}

}  // namespace

std::vector<StaticShared> static_shared(const void* function) {
  // Without them blocks on a thread of the host would share what each should have for itself.
  if (symbols().functions.empty())
    throw KernelError((loaded().library.empty() ? "the program" : loaded().library) +
                      " has no symbols (strip?), by which __shared__ is found");
  const Loaded& program = loaded();
  std::vector<StaticShared> found;
  const auto [first, last] =
      symbols().functions.equal_range(reinterpret_cast<std::uintptr_t>(function) - program.base);
  for (auto f = first; f != last; ++f) {
    // Itanium C++ ABI, 5.1.2 and 5.1.6: of function _Z<encoding> the local variable is
    // _ZZ<encoding>E<name>.
    const auto& [name, file] = f->second;
    if (name.rfind("_Z", 0) != 0) continue;
    const std::string local = "_ZZ" + name.substr(2) + "E";
    for (auto v = symbols().variables.lower_bound(local);
         v != symbols().variables.end() && v->first.rfind(local, 0) == 0; ++v) {
      if (file != 0 && v->second.file != 0 && v->second.file != file) continue;
      found.push_back({variable_name(std::string_view(v->first).substr(local.size())),
                       program.variables + v->second.offset, v->second.bytes});
    }
    if (!found.empty()) break;  // other names of the same code
  }
  return found;
}

ThreadVariables thread_variables() {
  const Loaded& program = loaded();
  return {program.variables, program.bytes};
}

std::string local_variable(const void* at) {
  const auto offset =
      static_cast<std::uintptr_t>(static_cast<const std::byte*>(at) - loaded().variables);
  const auto behind = symbols().local.upper_bound(offset);
  if (behind == symbols().local.begin()) return "";
  const auto& [name, variable] = *std::prev(behind)->second;
  if (offset - variable.offset >= variable.bytes) return "";
  // _ZZ<encoding>E<length><name>: the last part is the variable's.
  for (std::size_t e = name.rfind('E'); e != name.npos && e > 0; e = name.rfind('E', e - 1))
    if (const std::string last = variable_name(std::string_view(name).substr(e + 1)); !last.empty())
      return last;
  return "";
}

// __launch_bounds__(n) puts n instructions that do nothing before the kernel (cuda_names.h); the
// compiler lists where they begin.
extern "C" {
extern const std::uintptr_t __start___patchable_function_entries[]
    __attribute__((weak, visibility("hidden")));
extern const std::uintptr_t __stop___patchable_function_entries[]
    __attribute__((weak, visibility("hidden")));
}

std::size_t launch_bounds(const void* function) {
  constexpr std::size_t kMaxThreads = 1024;
  constexpr unsigned char kNop = 0x90;
  const auto entry = reinterpret_cast<std::uintptr_t>(function);
  for (const std::uintptr_t* at = __start___patchable_function_entries;
       at < __stop___patchable_function_entries; ++at) {
    if (*at >= entry || entry - *at > kMaxThreads) continue;
    const auto* code = reinterpret_cast<const unsigned char*>(*at);
    std::size_t nops = 0;
    while (*at + nops < entry && code[nops] == kNop) ++nops;
    if (*at + nops == entry) return nops;
  }
  return 0;
}

namespace {

std::string ask_addr2line(std::uintptr_t offset);

// A step is compiled through a file of one line that includes it; addr2line of binutils 2.40 names
// that one for lines of the first functions.
std::string included_by(const std::string& path) {
  if (path.find("/emulated/") == path.npos) return path;
  std::string line;
  std::getline(std::ifstream(path), line);
  const auto first = line.find('"'), end = line.rfind('"');
  return line.rfind("#include", 0) == 0 && first < end ? line.substr(first + 1, end - first - 1)
                                                       : path;
}

}  // namespace

std::string line_of(std::uintptr_t return_address) {
  const std::uintptr_t offset = return_address - 1 - loaded().base;  // the call is before it
  // To start addr2line takes longer than most launches.
  static thread_local std::map<std::uintptr_t, std::string> known;
  const auto [line, is_new] = known.try_emplace(offset);
  if (is_new) line->second = ask_addr2line(offset);
  return line->second;
}

namespace {
std::string ask_addr2line(std::uintptr_t offset) {
  char text[4096];
  std::snprintf(text, sizeof text, "addr2line -i -e '%s' 0x%zx 2>/dev/null",
                file_of_object().c_str(), static_cast<std::size_t>(offset));
  std::string last, any;
  if (const std::unique_ptr<FILE, int (*)(FILE*)> lines(popen(text, "r"), pclose); lines) {
    // Inlined functions come from the inside out; the first one that is not the machine's is the
    // kernel's.
    while (std::fgets(text, sizeof text, lines.get())) {
      last = text;
      const auto colon = last.find_last_of(':');
      if (colon == last.npos || last[0] == '?') continue;
      const std::string path = included_by(last.substr(0, colon));
      const long number = std::strtol(last.c_str() + colon + 1, nullptr, 10);
      if (number <= 0) continue;
      any = place_text(path, number);
      if (path.find("/emulator/") != path.npos || path.find("/ptx/") != path.npos ||
          path.find("/attn/kernel.h") != path.npos || path.rfind("/usr/", 0) == 0)
        continue;
      return any;
    }
  }
  if (!any.empty()) return any;
  std::snprintf(text, sizeof text, "program+0x%zx", static_cast<std::size_t>(offset));
  return text;
}
}  // namespace

std::string place_text(const std::string& path, long line) {
  auto cut = path.find_last_of('/');
  if (cut != path.npos && cut > 0) cut = path.find_last_of('/', cut - 1);
  return (cut == path.npos ? path : path.substr(cut + 1)) + ":" + std::to_string(line);
}
std::string Place::text() const { return place_text(file, line); }
std::string Where::text() const {
  return file ? place_text(file, static_cast<long>(at)) : line_of(at);
}

}  // namespace attn::emulator
