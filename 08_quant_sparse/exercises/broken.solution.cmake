# For attn_add_broken_steps: what is broken in the regions of ex08b, ex08c and ex08d.
set(broken_in_ex08b
  "mismatch" "max(at[i] - w.size[i] / 2, 0)" "max(at[i] - w.size[i] / 2 - 1, 0)"
  "mismatch" "canvas[i] - w.size[i])" "canvas[i] - w.size[i] - 1)"
  "mismatch" "at[0] < canvas[0] ?" "at[0] <= canvas[0] ?"
  "mismatch" "gWindows[3 * head + i]" "gWindows[i]")
set(broken_in_ex08c
  "mismatch" "b.begin_max <= row0 &&" "b.begin_min <= row0 &&"
  "mismatch" "b.end_min > last_row" "b.end_min >= last_row"
  "mismatch" "b.end_max > row0) is = kMasked" "b.end_max > last_row) is = kMasked")
set(broken_in_ex08d
  "mismatch" "pairs[i] = word >> i / 2 * 8" "pairs[i] = word >> i / 2 * 4"
  "mismatch" "? 0x00080008u : 0x00800080u" "? 0x00080008u : 0x00080008u"
  "mismatch" "chunk % 2 == 0 ? 0x74007400 : 0x64006400" "0x74007400")
