# gdb extension for kernels in the emulator:
#
#     gdb -x common/scripts/kernels_gdb.py --args build/debug/bin/04_flash_v2 --step v3_prefetch
#
#  - bf16 and fp16 print as numbers, threadIdx and the like as (x, y, z)
#  - tile EXPRESSION ROWS COLUMNS prints a tile; EXPRESSION contains $row and $col:
#       tile smem.sQ[swizzled_offset<64>($row, $col)] 4 8
#  - bt ends at the kernel and hides the emulator's frames (bt -no-filters shows them)
import itertools
import re
import struct

import gdb
import gdb.FrameDecorator
import gdb.printing


def bits_to_float(bits, kind):
    if kind == "bf16":
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    return struct.unpack("<e", struct.pack("<H", bits))[0]


class Number:
    """A 16-bit floating-point number."""

    def __init__(self, value, kind):
        self.text = "%.5g" % bits_to_float(int(value["bits"]), kind)

    def to_string(self):
        return self.text


class Index:
    """threadIdx, blockIdx, blockDim, gridDim."""

    def __init__(self, value):
        self.value = value

    def to_string(self):
        return "(%d, %d, %d)" % tuple(int(self.value[axis]) for axis in "xyz")


def number(value):
    if value.type.code == gdb.TYPE_CODE_REF:
        value = value.referenced_value()
    name = str(value.type.strip_typedefs().unqualified())
    kind = {"attn::emulator::BFloat16": "bf16", "attn::emulator::Float16": "fp16"}.get(name)
    return bits_to_float(int(value["bits"]), kind) if kind else float(value)


class Tile(gdb.Command):
    """tile EXPRESSION ROWS COLUMNS: the numbers of a tile; EXPRESSION gives that at $row, $col."""

    def __init__(self):
        super().__init__("tile", gdb.COMMAND_DATA)

    def invoke(self, argument, from_tty):
        parts = re.fullmatch(r"(.*\S)\s+(\d+)\s+(\d+)\s*", argument)
        if not parts or "$row" not in argument:
            raise gdb.GdbError(
                "tile EXPRESSION ROWS COLUMNS, as: tile smem.sQ[$row * 64 + $col] 4 8")
        expression, rows, columns = parts.group(1), int(parts.group(2)), int(parts.group(3))
        print("     " + "".join("%9d" % column for column in range(columns)))
        for row in range(rows):
            line = "%4d " % row
            for column in range(columns):
                gdb.set_convenience_variable("row", row)
                gdb.set_convenience_variable("col", column)
                line += "%9.4g" % number(gdb.parse_and_eval(expression))
            print(line)


class KernelFrame(gdb.FrameDecorator.FrameDecorator):
    """A frame without template arguments and types of parameters."""

    def function(self):
        return re.split("[<(]", str(super().function()))[0]


class KernelFrames:
    """A backtrace as a kernel has it: nothing below the launch."""

    def __init__(self):
        self.name, self.priority, self.enabled = "kernels", 100, True
        gdb.frame_filters[self.name] = self

    def filter(self, frames):
        def in_kernel(frame):
            return "launch_kernel" not in str(frame.inferior_frame().name())

        first = next(frames, None)
        if first is None or not in_kernel(first):
            return itertools.chain([first] if first else [], frames)
        return map(KernelFrame, itertools.chain([first], itertools.takewhile(in_kernel, frames)))


printers = gdb.printing.RegexpCollectionPrettyPrinter("kernels")
printers.add_printer("bf16", "^attn::emulator::BFloat16$", lambda value: Number(value, "bf16"))
printers.add_printer("fp16", "^attn::emulator::Float16$", lambda value: Number(value, "fp16"))
printers.add_printer("index", "^attn::emulator::Index3$", Index)
gdb.printing.register_pretty_printer(None, printers, replace=True)
Tile()
KernelFrames()
gdb.execute("set print elements 8")
gdb.execute("set print frame-arguments none")
gdb.execute("set print thread-events off")
