# For attn_add_broken_steps: what shows the answer of ex06a. A semicolon of the text is \; and no
# text is empty: a list loses empty elements where it is expanded.
set(broken_in_ex06a
  "race: tma_load(tile, map, full | tma_load(tile, map, full"
    "mbarrier_wait(empty, kv.phase() ^ 1)" "(void)empty"
  "deadlock" "mbarrier_wait(empty, kv.phase() ^ 1)" "mbarrier_wait(empty, kv.phase())")
set(broken_in_ex06a_fp8
  "race: smem.k_descale[kv.index()] | sDescale = descale"
    "sDescale = descale\;\n        mbarrier_arrive_expect(full, kTileBytes)\;"
    "mbarrier_arrive_expect(full, kTileBytes)\;\n        sDescale = descale\;")
