# The bytes of a file in decimal, for attn_decode of AttnHidden.cmake.
BEGIN { RS = "\001"; for (i = 1; i < 256; ++i) code[sprintf("%c", i)] = i }
{ for (i = 1; i <= length($0); ++i) printf "%d ", code[substr($0, i, 1)] }
