# For attn_add_broken_steps: what shows the answer of ex06a. A semicolon of the text is \;
set(broken_in_ex06a
  "race: tma_load(tile + | tma_load(tile +" "mbarrier_wait(empty, kv.phase() ^ 1)\;" "")
