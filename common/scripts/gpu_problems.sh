# shellcheck shell=bash
# The problems that verify_on_gpu.sh and sanitize.sh run for each chapter. Sourced; $bin is the
# folder of the programs. A chapter without problems here fails there, so that none is left out
# silently.

# Steps of a chapter whose names match a pattern, separated by commas, so that steps added later are
# measured too. If there are none, the pattern itself, which every program refuses.
steps_like() {  # CHAPTER PATTERN
  "${bin:?}/$1" --list | awk -v pattern="$2" '
    NR > 1 && $1 ~ /^[a-z]+[0-9]/ && $1 ~ pattern { printf "%s%s", separator, $1; separator = "," }
    END { print separator == "" ? pattern : "" }'
}
# Without those that need several GPUs (several_gpus.sh measures them).
all_steps() { steps_like "$1" '^[^p]' | tr , '\n'; }
operation_of() { "$bin/$1" --list | awk -v step="$2" '$1 == step { print $2; exit }'; }  # CHAPTER STEP

# 33 lengths, uniform from 4096 to 16384.
kRaggedLengths=10370,7782,6486,13951,12221,14678,14311,10350,7728,10296,11876,\
4569,4644,10989,12049,7585,11360,11728,8756,5986,13560,9109,\
7735,7644,13211,5516,10823,8859,16281,13866,5447,14907,10459

# ---- times: a name for the file, then options, one per line ------------------------------------
# Problems named memory_* are not launched: the program prints the memory each step needs, and
# stops.
problems_of() {
  local name batch length n d mask rows cols type types bytes steps softcap packed backward repeat
  case $1 in
    01_naive)
      for n in 1024 2048 4096 8192; do
        repeat=
        [ $n -lt 8192 ] || repeat="--warmup 1 --repeat 7"  # seconds a launch of v1
        echo "forward_n$n --operation forward --batch 4 --heads 16 --head-dim 128 --seqlen $n" \
          "$repeat"
        echo "backward_n$n --operation backward --step b2_cublas --batch 4 --heads 16 --head-dim" \
          "128 --seqlen $n $repeat"
      done
      echo "forward_n16384 --step v12_cp_async,v13_cublas --heads 16 --head-dim 128 --seqlen 16384"
      echo "forward_causal_n4096 --step v5_register_tiles,v10_ldmatrix,v12_cp_async,v13_cublas" \
        "--batch 4 --heads 16 --head-dim 128 --seqlen 4096 --causal"
      echo "forward_fp32_n4096 --step v5_register_tiles,v13_cublas --batch 4 --heads 16" \
        "--head-dim 128 --seqlen 4096 --dtype fp32"
      echo "backward_b1_n2048 --operation backward --batch 4 --heads 16 --head-dim 128 --seqlen" \
        "2048"
      for n in $kMemoryLengths; do
        echo "memory_n$n --step v13_cublas --heads 16 --head-dim 128 --seqlen $n"
      done ;;
    02_online_softmax)
      # 512 MiB of values, in rows that fit on the chip and in rows that do not.
      for type in bf16 fp32; do
        case $type in bf16) bytes=2 ;; fp32) bytes=4 ;; esac
        for cols in 1024 4096 16384 65536; do
          rows=$((512 * 1024 * 1024 / bytes / cols))
          echo "softmax_${type}_c$cols --operation softmax --rows $rows --cols $cols --dtype $type"
        done
        # Few long rows: v1 and v2 would occupy only 8 SMs.
        for cols in 262144 16777216; do
          echo "softmax_${type}_8x$cols --step v3_warp,v4_one_read,v5_split_row --rows 8 --cols" \
            "$cols --dtype $type"
        done
      done
      echo "softmax_topk_8192 --operation softmax_topk --rows 8192 --cols 8192 --top-k 8"
      echo "forward_n1024 --operation forward --batch 4 --heads 16 --head-dim 128 --seqlen 1024"
      echo "decode_n16384 --operation forward --batch 16 --heads 16 --head-dim 128 --seqlen-q 1" \
        "--seqlen-k 16384" ;;
    03_flash_v1)
      # 16384 tokens and 2048 / d heads for every length.
      backward=$(steps_like "$1" '^b[5-9]')  # the others are a hundred times slower
      for d in 64 128; do
        for mask in "" causal; do
          for n in 1024 2048 4096 8192 16384; do
            steps=v7_grid,v8_warp_pair_barriers,v9_rows_per_warp,v10_exp2
            # One CTA per head: far slower, which two lengths suffice to show.
            case $n in 2048|8192) steps=v5_tensor_core,v6_async,$steps ;; esac
            echo "forward_d$d${mask:+_$mask}_n$n --step $steps $(tokens $d $n) ${mask:+--$mask}"
            case $n in
              2048|8192) echo "backward_d$d${mask:+_$mask}_n$n --operation backward --step $backward $(tokens $d $n) ${mask:+--$mask}" ;;
            esac
          done
        done
      done
      # The figure on the first page: every forward step on the problem of 01's forward_n4096.
      echo "climb_n4096 --step $(steps_like "$1" '^v([2-9]|10)_') $(tokens 128 4096)"
      # One thread per element of S: a hundred times slower.
      echo "forward_scalar_n1024 --step $(steps_like "$1" '^v1_') $kScalar"
      echo "forward_fp32_gemms_n1024 --step $(steps_like "$1" '^v[2345]_') $kScalar16"
      echo "backward_scalar_n1024 --operation backward --step $(steps_like "$1" '^b[12]') $kScalar"
      echo "backward_fp32_gemms_n1024 --operation backward --step $(steps_like "$1" '^b[345]')" \
        "$kScalar16"
      # Problems that chapter 01 does not support.
      echo "forward_n131072 --step v10_exp2 --heads 16 --head-dim 128 --seqlen 131072 --warmup 1" \
        "--repeat 3"
      for n in $kMemoryLengths; do
        echo "memory_n$n --step v10_exp2 --heads 16 --head-dim 128 --seqlen $n"
      done ;;
    04_flash_v2)
      # 16384 tokens and 2048 / d heads for every length. All lengths, and d=256, are in the peers'
      # list.
      for d in 64 128; do
        for mask in "" causal; do
          for n in 2048 16384; do
            echo "forward_d$d${mask:+_$mask}_n$n --step $(steps_like "$1" '^v') $(tokens $d $n)" \
              "${mask:+--$mask}"
            echo "backward_d$d${mask:+_$mask}_n$n --operation backward --step" \
              "$(steps_like "$1" '^b') $(tokens $d $n) ${mask:+--$mask}"
          done
        done
      done
      echo "climb_n4096 --step $(steps_like "$1" '^v') $(tokens 128 4096)"
      features_of v13_tuned ;;
    05_flash_decoding)
      # Single steps where they differ most; the last steps at all the peers' problems, in the
      # peers' list.
      echo "decode_b1_n8192 $(cache 1 8192 32 8)"
      echo "decode_b1_n65536 $(cache 1 65536 32 8)"
      echo "decode_b16_n8192 $(cache 16 8192 32 8)"
      echo "decode_mha_b16_n1024 $(cache 16 1024 32 32)"
      echo "decode_g8_b16_n8192 $(cache 16 8192 64 8)"
      # More rows; mixed lengths, and as many tokens in equal lengths; features.
      steps=$(steps_like "$1" '^v(7|10|1[2-9])_')
      for n in 4 8; do
        echo "decode_q$n --step $steps $(cache 16 8192 64 8) --seqlen-q $n --causal"
      done
      steps=$(steps_like "$1" '^v([7-9]|1[0-9])_')
      echo "decode_ragged --step $steps $(cache 33 16281 32 8) --seqused $kRaggedLengths"
      echo "decode_as_many --step $steps $(cache 33 10156 32 8)"
      steps=$(steps_like "$1" '^v1[3-9]_')
      echo "decode_split_keys --step $steps $(cache 16 8192 32 8) --split-keys 2048"
      # Scores in the range of the unified maximum above, and outside it.
      steps=$(steps_like "$1" '^v1[34]_')
      echo "decode_peaked --step $steps $(cache 16 8192 32 8) --inputs peaked"
      steps=$(steps_like "$1" '^v1(3|[6-9])_')
      echo "decode_features --step $steps $(cache 16 8192 32 8) --softcap 30 --alibi" ;;
    07_paged)
      # Where pages cost most, and where lengths differ most.
      echo "decode_b1_n1024 $(pages 1 const:1024 32 8)"
      echo "decode_b16_n8192 $(pages 16 const:8192 32 8)"
      for n in 1 64 256; do echo "decode_b16_n8192_page$n $(pages 16 const:8192 32 8)" \
        "--page-size $n"; done
      echo "decode_u4k16k_b33 $(pages 33 uniform:4096,16384 32 8) --seed 7"
      echo "decode_1x128k_63x1k $(one_long 63 32 8)"
      echo "decode_u16_512_b256 $(pages 256 uniform:16,512 32 8) --seed 7"
      # The other batches with which other libraries were measured; "g8": 64 query heads.
      steps=$(steps_like "$1" '^v([356]|14)_')
      for n in "b1_n8192 1 8192" "b1_n65536 1 65536" "b16_n1024 16 1024" "b64_n4096 64 4096"; do
        read -r name batch length <<<"$n"
        echo "others_$name --step $steps $(pages "$batch" "const:$length" 32 8)"
      done
      echo "others_1x128k_15x1k --step $steps $(one_long 15 32 8)"
      for name in u4k16k_b16 u512_2k_b64 u16_512_b256; do
        echo "others_$name --step $steps $(ragged $name 32 8)"
      done
      echo "others_g8_b16_n8192 --step $steps $(pages 16 const:8192 64 8)"
      for n in 63 15; do echo "others_g8_1x128k_${n}x1k --step $steps $(one_long $n 64 8)"; done
      for name in g8_u4k16k_b33 g8_u4k16k_b16 g8_u512_2k_b64 g8_u16_512_b256; do
        echo "others_$name --step $steps $(ragged $name 64 8)"
      done
      # A shared prefix of 32k, and the same sequences without sharing.
      echo "decode_prefix_32k_b64 --step v5_balanced_plan,v8_shared_prefix,v17_prefix_tma" \
        "$(pages 64 const:32896 32 8) --shared-prefix 32768"
      # The cost of score variants.
      echo "decode_plain --step v10_variants $(pages 16 const:8192 32 8)"
      echo "decode_softcap --step v10_variants $(pages 16 const:8192 32 8) --softcap 30"
      echo "decode_alibi --step v10_variants $(pages 16 const:8192 32 8) --alibi"
      echo "decode_sinks --step v10_variants $(pages 16 const:8192 32 8) --sinks"
      echo "decode_rotary --step v10_variants $(pages 16 const:8192 32 8) --rotary"
      # A tree of 64 tokens, and a single token.
      for n in 1 64; do
        echo "prefill_tree_$n --operation paged_prefill --step v9_tree_mask" \
          "$(pages 64 const:4096 32 32) --seqlen-q $n --tree"
      done
      # Prompts as in chapter 04; chunks after long caches; one long prompt among short ones.
      echo "prefill_d128_causal_n2048 --operation paged_prefill $(tokens 128 2048) --causal"
      echo "prefill_d128_causal_n16384 --operation paged_prefill $(tokens 128 16384) --causal"
      for n in 1 64; do echo "prefill_d128_causal_n2048_page$n --operation paged_prefill" \
        "$(tokens 128 2048) --causal --page-size $n"; done
      # TMA boxes of 2, 16 and 32 KiB, and the other head dims.
      for n in 8 64 256; do echo "prefill_d128_causal_n16384_page$n --operation paged_prefill" \
        "--step v15_prefill_tma $(tokens 128 16384) --causal --page-size $n"; done
      for d in 64 256; do echo "prefill_d${d}_causal_n16384 --operation paged_prefill --step" \
        "v7_prefill,v15_prefill_tma $(tokens $d 16384) --causal"; done
      echo "prefill_chunks --operation paged_prefill --heads 32 --kv-heads 8 --head-dim 128" \
        "--causal --varlen 2048,512,512,128 --varlen-k 16384,8192,4096,128"
      # Chunks of a prompt together with decoding sequences: in one launch, in two, and in two
      # streams.
      for mixed in 512,4096,32,4096 1024,8192,64,4096 2048,2048,64,2048 2048,16384,64,4096 \
        512,16384,32,8192 4096,4096,16,1024; do
        for how in "" serial streams; do
          echo "mixed${how:+_$how}_${mixed//,/_} --operation paged_prefill --step v11_mixed" \
            "$(mix ${mixed//,/ }) ${how:+--$how}"
        done
      done
      # Latent attention with 16 and with 128 heads.
      for h in 16 128; do
        for n in 1,8192 32,4096 128,4096; do
          echo "mla_h${h}_b${n/,/_n} --operation paged_mla $(latent ${n/,/ } $h)"
        done
      done
      # 134 and 537 MB of new tokens, 227 MB of copied pages; read and written.
      echo "append_128mb --operation paged_append --batch 16 --kv-heads 8 --heads 8 --head-dim" \
        "128 --seqlen-q 1024 --lengths const:8192"
      echo "append_512mb --operation paged_append --batch 16 --kv-heads 8 --heads 8 --head-dim" \
        "128 --seqlen-q 4096 --lengths const:8192"
      echo "append_rotary_128mb --operation paged_append --batch 16 --kv-heads 8 --heads 8" \
        "--head-dim 128 --seqlen-q 1024 --lengths const:8192 --rotary"
      echo "copy_128mb --operation page_copy --batch 2048 --kv-heads 8 --heads 8 --head-dim 128" ;;
    08_quant_sparse)
      # P V in e4m3 at all lengths with d=128; the rest where lengths differ most.
      for d in 64 128 256; do
        for mask in "" causal; do
          for n in 512 1024 2048 4096 8192 16384; do
            case $d/$n in
              128/2048|128/16384) types="int8 e4m3" ;;
              128/*|*/2048|*/16384) types=e4m3 ;;
              *) continue ;;
            esac
            for type in $types; do
              echo "forward_${type}_d$d${mask:+_$mask}_n$n --dtype $type $(tokens $d $n)" \
                "${mask:+--$mask}"
            done
          done
        done
      done
      for type in int8 e4m3 int4; do
        for n in 1024 8192 65536; do
          echo "decode_${type}_b1_n$n --operation decode --dtype $type $(cache 1 $n 32 8)"
        done
        for b in 16 64; do
          echo "decode_${type}_b${b}_n8192 --operation decode --dtype $type $(cache $b 8192 32 8)"
        done
      done
      # The parts of a cache that are read.
      for n in 4096 32768; do
        for b in 16 64; do
          echo "sparq_b${b}_n$n --operation sparq $(cache $b $n 32 8)"
        done
      done
      echo "sparq_mha_b64_n4096 --operation sparq $(cache 64 4096 32 32)"
      # Time against density; the twelve column masks; a video canvas with two windows.
      steps=$(steps_like "$1" '^s1_')
      for d in 64 128 256; do
        for n in 0.05 0.1 0.25 0.5 0.75 1; do
          echo "blocks_d${d}_n8192_$n --step $steps $(tokens $d 8192) --mask random:$n"
        done
      done
      steps=$(steps_like "$1" '^s2_')
      for n in 8192 32768; do
        for mask in $kFlashMasks; do
          echo "columns_${mask%:*}_n$n --step $steps --heads 16 --head-dim 128 --seqlen $n" \
            "--mask flashmask:${mask%:*} ${mask#*:}"
        done
      done
      steps=$(steps_like "$1" '^s[13]_')
      for mask in 18x24x24 30x40x40; do
        echo "canvas_$mask --step $steps $kCanvas,$mask"
      done
      # Blocks selected by their means, on a field: time against the kept share.
      for n in 0.1 0.25 0.5 1; do
        echo "chosen_n8192_$n --step $(steps_like "$1" '^s4_') $kField8k --keep $n"
        echo "skipped_n8192_$n --step $(steps_like "$1" '^s5_') $kField8k --keep $n --skip-below 8"
        echo "ordered_n8192_$n --step $(steps_like "$1" '^s6_') $kField8k --keep $n"
        echo "chosen_e4m3_n8192_$n --step $(steps_like "$1" '^s[789]_') $kField8k --keep $n" \
          "--dtype e4m3"
      done
      echo "ordered_n65536_0.25 --step $(steps_like "$1" '^s6_') $kField64k --keep 0.25"
      echo "chosen_e4m3_n65536_0.25 --step $(steps_like "$1" '^s[789]_') $kField64k" \
        "--keep 0.25 --dtype e4m3"
      echo "chosen_n65536_0.25 --step $(steps_like "$1" '^s4_') $kField64k --keep 0.25" ;;
    06_flash_v3_hopper)
      for d in 64 128 256; do
        for mask in "" causal; do
          for n in 512 2048 16384; do
            case $d/$n in 128/*|*/16384) echo "forward_d$d${mask:+_$mask}_n$n $(tokens $d $n) ${mask:+--$mask}" ;; esac
          done
        done
      done
      for d in 64 128 256; do
        case $d in
          64) steps=$(steps_like "$1" '^b([1-7]|10)_') ;;
          128) steps=$(steps_like "$1" '^b([1-7]|1[03])_') ;;
          256) steps=$(steps_like "$1" '^b([89]|1[16])_') ;;
        esac
        for mask in "" causal; do
          for n in 512 2048 16384; do
            echo "backward_d$d${mask:+_$mask}_n$n --operation backward --step $steps" \
              "$(tokens $d $n) ${mask:+--$mask}"
          done
        done
      done
      # Features of the backward pass: neither, softcap, packed sequences.
      for d in 64 128 256; do
        steps=b7_dependent_launches softcap=b12_features packed=b12_features
        [[ $d != 256 ]] ||
          steps=b16_issue_order softcap=b14_softcap_d256,b15_packed_d256 packed=b15_packed_d256
        echo "backward_plain_d${d}_causal_n2048 --operation backward --step $steps,$softcap" \
          "$(tokens $d 2048) --causal"
        echo "backward_softcap_d${d}_causal_n2048 --operation backward --step $softcap" \
          "$(tokens $d 2048) --causal --softcap 30"
        echo "backward_varlen_d${d}_causal_n8192 --operation backward --step $packed" \
          "--varlen 128,4096,256,1024,8192,512,2048,128 --heads $((2048 / d)) --head-dim $d" \
          "--causal"
      done
      # The alternatives to chapter 08's skipping steps: all blocks, and no lists.
      for d in 64 128 256; do echo "forward_d${d}_n8192 --step v14_tuned $(tokens $d 8192)"; done
      echo "forward_d128_n115200 --step v14_tuned --batch 1 --heads 24 --head-dim 128" \
        "--seqlen 115200"
      echo "climb_n4096 --step $(steps_like "$1" '^v') $(tokens 128 4096)"
      features_of v14_tuned
      echo "forward_fp16_n4096 --step v14_tuned $(tokens 128 4096) --dtype fp16"
      # FP8: all lengths, with two exceptions only for the last steps.
      for d in 64 128 256; do
        for mask in "" causal; do
          for n in 512 1024 2048 4096 8192 16384; do
            steps=$(steps_like "$1" '^f[1-68]')
            case $d/$n in 128/2048|128/16384) ;; *) steps=$(steps_like "$1" '^f[13-68]') ;; esac
            echo "forward_e4m3_d$d${mask:+_$mask}_n$n --step $steps $(tokens $d $n)" \
              "${mask:+--$mask}"
          done
        done
      done
      # A rotary embedding: as a separate pass, and fused.
      for d in 64 128 256; do
        echo "forward_e4m3_rotary_d${d}_n2048 --step $(steps_like "$1" '^f[678]')" \
          "$(tokens $d 2048) --rotary"
      done ;;
  esac
}
# The cost of a feature: each with and without it.
features_of() {  # STEP
  echo "forward_plain_n4096 --step $1 $(tokens 128 4096)"
  echo "forward_gqa_n4096 --step $1 $(tokens 128 4096) --kv-heads" \
    "2"  # 8 query heads share one of K and V
  echo "forward_plain_n16384 --step $1 $(tokens 128 16384)"
  case $1 in v13_tuned|v14_tuned) echo "forward_window_n16384 --step $1 $(tokens 128 16384) --window 1024,0" ;; esac
  # 16384 tokens in sequences of one length, and of 8 lengths of which the longest has half.
  echo "forward_fixed_n2048 --step $1 $(tokens 128 2048)"
  echo "forward_varlen_n8192 --step $1 --varlen 128,4096,256,1024,8192,512,2048,128 --heads 16" \
    "--head-dim 128"
}
kMemoryLengths="1024 2048 4096 8192 16384 32768 65536 131072"
# Kinds of --mask flashmask:, and the other options they need.
kFlashMasks="causal:--causal sliding_window:--causal causal_document:--causal document: share_question:--causal \
global_sliding_window: causal_blockwise:--causal prefix_lm_causal: prefix_lm_document: qk_sparse:--causal \
hash_sparse:--causal random_eviction:--causal"
kCanvas="--heads 24 --head-dim 128 --seqlen 115200 --mask sta:30x48x80,6x8x8"
kField8k="--operation predict --heads 16 --head-dim 128 --seqlen 8192 --inputs field:8x32x32"
kField64k="--operation predict --heads 16 --head-dim 128 --seqlen 65536 --inputs field:16x64x64"
kScalar="--heads 16 --head-dim 64 --seqlen 1024 --dtype fp32"
kScalar16="--heads 16 --head-dim 64 --seqlen 1024"
cache() { echo "--batch $1 --heads $3 --kv-heads $4 --head-dim 128 --seqlen-k $2"; }  # BATCH LENGTH HEADS KV_HEADS
pages() { echo "--batch $1 --lengths $2 --heads $3 --kv-heads $4 --head-dim 128"; }  # BATCH LENGTHS HEADS KV_HEADS
ragged() {  # NAME in ragged_lengths.txt, HEADS KV_HEADS
  local room lengths
  read -r _ room lengths < <(grep "^$1 " "$(dirname "${BASH_SOURCE[0]}")/ragged_lengths.txt")
  echo "--batch $(tr ',' '\n' <<<"$lengths" | wc -l) --seqlen-k $room --seqused $lengths" \
    "--heads $2 --kv-heads $3 --head-dim 128"
}
# A sequence of 131072 tokens, and others of 1024.
one_long() {  # OTHERS HEADS KV_HEADS
  echo "--batch $(($1 + 1)) --seqlen-k 131072 --seqused 131072$(printf ',1024%.0s' $(seq "$1"))" \
    "--heads $2 --kv-heads $3 --head-dim 128"
}
latent() { echo "--batch $1 --lengths const:$2 --heads $3 --page-size 64"; }  # BATCH LENGTH HEADS
mix() {  # TOKENS of a chunk, KEYS it sees, SEQUENCES that decode, their LENGTH
  local ones lengths
  ones=$(printf ',1%.0s' $(seq "$3")) lengths=$(printf ",$4%.0s" $(seq "$3"))
  echo "--heads 32 --kv-heads 8 --head-dim 128 --causal --varlen $1$ones --varlen-k $2$lengths"
}
tokens() { echo "--batch $((16384 / $2)) --heads $((2048 / $1)) --head-dim $1 --seqlen $2"; }  # D N

# ---- counters: the problem that a step is profiled with ---------------------------------------
# One of the problems above, so that the JSON's model can be compared with the ncu counters.
profiled_problem() {  # CHAPTER STEP
  case $1/$2 in
    01_naive/*) tokens 128 2048 ;;
    02_online_softmax/v5_*) echo "--rows 8 --cols 16777216" ;;
    02_online_softmax/v6_*) echo "--rows 8192 --cols 8192 --top-k 8" ;;
    02_online_softmax/v7_*) tokens 128 2048 ;;
    02_online_softmax/*) echo "--rows 4096 --cols 65536" ;;
    03_flash_v1/v1_*|03_flash_v1/b[12]_*) echo "$kScalar" ;;
    03_flash_v1/v[234]_*|03_flash_v1/b[34]_*) echo "$kScalar16" ;;
    03_flash_v1/*) tokens 128 2048 ;;
    04_flash_v2/*) echo "$(tokens 128 2048) --causal" ;;
    05_flash_decoding/*) cache 16 8192 32 8 ;;
    06_flash_v3_hopper/f7_*) echo "$(tokens 128 2048) --rotary" ;;
    06_flash_v3_hopper/b[89]_*|06_flash_v3_hopper/b1[1456]_*) tokens 256 2048 ;;
    06_flash_v3_hopper/*) tokens 128 2048 ;;
    08_quant_sparse/d4_*) echo "--operation sparq $(cache 64 4096 32 32)" ;;
    08_quant_sparse/d*) cache 16 8192 32 8 ;;
    08_quant_sparse/s1_*) echo "$(tokens 128 8192) --mask random:0.25" ;;
    08_quant_sparse/s2_*) echo "--heads 16 --head-dim 128 --seqlen 8192 --mask flashmask:document" ;;
    08_quant_sparse/s3_*) echo "$kCanvas,18x24x24" ;;
    08_quant_sparse/s[46]_*) echo "$kField8k --keep 0.25" ;;
    08_quant_sparse/s5_*) echo "$kField8k --keep 0.25 --skip-below 8" ;;
    08_quant_sparse/s7_* | 08_quant_sparse/s8_* | 08_quant_sparse/s9_*)
      echo "$kField8k --keep 0.25 --dtype e4m3" ;;
    08_quant_sparse/*) tokens 128 2048 ;;
    07_paged/v8_*|07_paged/v17_*) echo "$(pages 64 const:32896 32 8) --shared-prefix 32768" ;;
    07_paged/v1[236]_*) latent 128 4096 128 ;;
    07_paged/v11_*) mix 2048 16384 64 4096 ;;
    07_paged/v[79]_*|07_paged/v15_*) echo "$(tokens 128 2048) --causal" ;;
    07_paged/a1_*) echo "--batch 16 --kv-heads 8 --heads 8 --head-dim 128 --seqlen-q 1024 --lengths const:8192" ;;
    07_paged/c1_*) echo "--batch 2048 --kv-heads 8 --heads 8 --head-dim 128" ;;
    07_paged/*) pages 16 const:8192 32 8 ;;
  esac
}

# ---- peers: a name for the file, then options of peers.py; and the problem list of each --------
# .fa3, .fp8 and .pages: of peers_formats.py.
peers_of() {
  case $1 in
    01_naive) echo "peers.$1 --steps v12_cp_async,v13_cublas --backends math,flash,cudnn" ;;
    02_online_softmax) echo "peers.$1 --operation softmax --steps v4_one_read,v5_split_row --repeat 5" ;;
    03_flash_v1)
      echo "peers.$1.forward --steps v10_exp2 --backends 01_naive:v13_cublas,math,flash,cudnn" \
        "--repeat 5"
      echo "peers.$1.backward --operation backward --steps $(steps_like "$1" '^b[67]')" \
        "--backends 01_naive:b2_cublas,flash,cudnn --repeat 5" ;;
    04_flash_v2)
      echo "peers.$1.forward --steps v13_tuned --backends flash,cudnn --repeat 5"
      echo "peers.$1.backward --operation backward --steps $(steps_like "$1" '^b[78]')" \
        "--backends flash,cudnn --repeat 5"
      echo "peers.$1.flex --steps v4_unmasked_blocks,v13_tuned --backends flex --repeat 5" ;;
    05_flash_decoding)
      echo "peers.$1 --operation decode" \
        "--steps v10_vectorised_combine,v13_even_splits,v14_unified_max" \
        "--backends cudnn,flash --repeat 5"
      echo "peers.$1.fa3 --operation decode --steps v13_even_splits" \
        "--backends fa3,cudnn --repeat 5" ;;
    06_flash_v3_hopper)
      echo "peers.$1.forward --steps v14_tuned --backends fa3,cudnn --repeat 5"
      echo "peers.$1.gqa_fp16 --steps v14_tuned --backends cudnn,flash --repeat 5"
      echo "peers.$1.backward --operation backward" \
        "--steps b7_dependent_launches,b10_deterministic --backends fa3,cudnn --repeat 5"
      echo "peers.$1.backward_d256 --operation backward" \
        "--steps b16_issue_order,b11_deterministic_cluster --backends fa3,cudnn --repeat 5"
      echo "peers.$1.fp8 --dtype e4m3" \
        "--steps f1_fp8,f4_block_scales,f5_incoherent,f8_q_in_registers" \
        "--backends fa3_e4m3,fa3_e4m3_casts,fa3,cudnn --repeat 5" ;;
    07_paged)  # on contiguous K and V, which is as good as pages can be
      echo "peers.$1 --operation decode" \
        "--steps v2_page_table,v5_balanced_plan,v14_cross_work_tile" \
        "--backends cudnn,flash --repeat 5"
      echo "peers.$1.pages --operation decode --steps v5_balanced_plan --backends fa3_pages" \
        "--repeat 5" ;;
    08_quant_sparse)
      echo "peers.$1.fp8 --dtype e4m3 --steps q8_tuned" \
        "--backends sage_per_warp,fa3_e4m3_casts,fa3,cudnn --repeat 5" ;;
  esac
}
both_masks() {  # HEAD_DIMS LENGTHS: each without a mask, then with a causal one
  local n d mask
  for d in $1; do
    for mask in "" --causal; do
      for n in $2; do echo "$(tokens "$d" "$n") $mask"; done
    done
  done
}
peer_problems() {  # FILE, as peers_of calls it
  local n d mask
  case $1 in
    peers.01_naive)
      for n in 1024 2048 4096 8192; do echo "--batch 4 --heads 16 --head-dim 128 --seqlen" \
        "$n"; done ;;
    peers.02_online_softmax)
      problems_of 02_online_softmax | sed -n 's/^softmax_[bf].* --rows/--rows/p' ;;
    peers.03_flash_v1.*)
      for d in 64 128; do
        for mask in "" --causal; do
          for n in 1024 2048 4096 8192 16384; do
            # Each run has a startup cost: d=64 at two lengths, backward at the longer ones.
            case $1/$d/$n in */64/1024|*/64/4096|*/64/16384|*.backward/*/1024|*.backward/*/4096) continue ;; esac
            echo "$(tokens $d $n) $mask"
          done
        done
      done ;;
    peers.05_flash_decoding*)
      for n in 1024 8192 65536 262144; do cache 1 $n 32 8; done
      cache 16 1024 32 8
      cache 16 8192 32 8
      cache 64 4096 32 8
      for n in 1024 8192 65536; do cache 1 $n 32 32; done
      cache 16 1024 32 32
      cache 16 8192 32 32
      cache 1 8192 64 8
      cache 16 1024 64 8
      cache 64 4096 64 8
      cache 1 1024 32 4
      cache 1 8192 32 4
      cache 16 8192 32 4 ;;
    peers.07_paged*)
      for n in 1024 8192 65536; do cache 1 $n 32 8; done
      cache 16 1024 32 8
      cache 16 8192 32 8
      cache 64 4096 32 8
      cache 16 8192 64 8 ;;
    # Each shape is compiled, which takes some ten seconds.
    peers.04_flash_v2.flex)
      for n in 2048 16384; do
        for mask in "" --causal; do echo "$(tokens 128 $n) $mask"; done
      done ;;
    peers.06_flash_v3_hopper.gqa_fp16)
      for mask in "" --causal; do
        for n in 1024 4096 16384; do
          echo "--batch $((16384 / n)) --heads 32 --kv-heads 8 --head-dim 128 --seqlen $n $mask"
          echo "$(tokens 128 $n) $mask --dtype fp16"
        done
      done ;;
    peers.06_flash_v3_hopper.fp8) both_masks "64 128 256" "512 2048 16384" ;;
    peers.08_quant_sparse.fp8) both_masks "64 128" "1024 4096 16384" ;;
    peers.06_flash_v3_hopper.backward)
      for d in 64 128; do
        for mask in "" --causal; do
          for n in 512 1024 2048 4096 8192 16384; do
            case $d in
              64) echo "$(tokens 64 $n) $mask" ;;
              128) echo "$(tokens 128 $n) $mask" \
                "--steps b13_v_in_registers,b7_dependent_launches,b10_deterministic" ;;
            esac
          done
        done
      done ;;
    peers.06_flash_v3_hopper.backward_d256) both_masks 256 "512 1024 2048 4096 8192 16384" ;;
    peers.04_flash_v2.*|peers.06_*)
      for d in 64 128 256; do
        for mask in "" --causal; do
          for n in 512 1024 2048 4096 8192 16384; do
            # FlashAttention-2 differs by 2.5e-2 there, more than peers.py allows.
            case $1/$d/$n/$mask in peers.04_flash_v2.backward/128/512/) continue ;; esac
            echo "$(tokens $d $n) $mask"
          done
        done
      done ;;
  esac
}

# ---- sanitizer: small problems that cover every path of every step of an operation ---------------
# The tools slow a kernel down a hundredfold. sanitize.sh fails if a step refuses all problems of
# its operation.
sanitizer_problems() {  # CHAPTER OPERATION
  case $1/$2 in
    # Partial tiles in every dimension, grouped heads, masks, the three types.
    01_naive/*|02_online_softmax/forward)
      echo "--seqlen-q 133 --seqlen-k 201 --head-dim 72 --heads 4 --kv-heads 2 --causal --inputs" \
        "needle"
      echo "--seqlen 65 --head-dim 64 --dtype fp16 --window 17,3"
      echo "--seqlen-q 70 --seqlen-k 33 --head-dim 40 --dtype fp32 --causal" ;;
    # v4: a row in part of a warp, in two warps, in all warps and shared memory; v5: one chunk and
    # three.
    02_online_softmax/softmax)
      echo "--rows 5 --cols 1003 --inputs needle"
      echo "--rows 9 --cols 1502 --dtype fp32 --inputs peaked"
      echo "--rows 2 --cols 40001 --dtype fp32"
      echo "--rows 70 --cols 131 --dtype fp16 --causal" ;;
    # Full lists and partial lists.
    02_online_softmax/softmax_topk)
      echo "--rows 5 --cols 1003 --top-k 8 --inputs needle"
      echo "--rows 7 --cols 33 --top-k 32 --dtype fp32 --causal" ;;
    # The three head dims of the tensor-core steps, two tiles of keys and of queries, dropout; fp32
    # for the rest. No more than that: the scalar steps already take a minute each under racecheck.
    03_flash_v1/*)
      echo "--seqlen-q 133 --seqlen-k 141 --head-dim 128 --heads 2 --kv-heads 1 --causal" \
        "--inputs needle"
      echo "--seqlen 65 --head-dim 64 --dtype fp16 --window 17,3 --dropout 0.25"
      echo "--seqlen-q 150 --seqlen-k 33 --head-dim 32"
      echo "--seqlen-q 70 --seqlen-k 33 --head-dim 40 --dtype fp32 --causal" ;;
    # Each head dim, several queries, splits without keys, an empty sequence; several row tiles, more
    # sequences than a warp has lanes.
    05_flash_decoding/forward|05_flash_decoding/backward)
      echo "--devices 0,0 --transport copies --seqlen 300 --heads 4 --kv-heads 2 --head-dim 64" \
        "--causal" ;;
    05_flash_decoding/*)
      echo "--batch 3 --seqused 700,0,1 --seqlen-k 700 --heads 4 --kv-heads 2 --head-dim 128" \
        "--inputs needle"
      echo "--seqlen-q 5 --seqlen-k 300 --heads 8 --kv-heads 2 --head-dim 64 --causal --dtype fp16"
      echo "--seqlen-k 1000 --heads 3 --kv-heads 1 --head-dim 256 --window 130,0"
      echo "--seqlen-q 10 --seqlen-k 1500 --heads 8 --kv-heads 1 --head-dim 128 --causal"
      echo "--batch 40 --seqlen-k 130 --heads 2 --kv-heads 2 --head-dim 64"
      echo "--seqlen-q 3 --seqlen-k 900 --heads 4 --kv-heads 1 --head-dim 128 --softcap 15 --alibi"
      echo "--batch 2 --seqlen-k 700 --heads 8 --kv-heads 2 --head-dim 128 --split-keys 256" ;;
    # Each head dim and several page sizes, plans for few and for many CTAs, empty sequences.
    07_paged/paged_decode)
      echo "--batch 3 --seqused 700,0,1 --seqlen-k 700 --heads 4 --kv-heads 2 --head-dim 128" \
        "--inputs needle"
      echo "--seqlen-q 5 --seqlen-k 300 --heads 8 --kv-heads 2 --head-dim 64 --causal --dtype" \
        "fp16 --page-size 5 --blocks 3"
      echo "--seqlen-k 1000 --heads 3 --kv-heads 1 --head-dim 256 --window 130,0 --page-size 64" \
        "--blocks 7"
      echo "--batch 40 --lengths uniform:0,130 --heads 2 --kv-heads 2 --head-dim 64 --page-size 1"
      echo "--lengths const:300 --heads 8 --kv-heads 2 --head-dim 128 --softcap 15 --alibi"
      echo "--batch 2 --lengths const:300 --heads 8 --kv-heads 2 --head-dim 64 --sinks --rotary" \
        "--blocks 3"
      echo "--batch 7 --seqused 301,700,310,600,420,200,500 --seqlen-k 700 --heads 10 --kv-heads" \
        "2 --head-dim 128 --shared-prefix 300,3 --blocks 3" ;;
    07_paged/paged_prefill)
      echo "--varlen 17,5,0,130 --varlen-k 40,5,4,300 --heads 4 --kv-heads 2 --head-dim 128" \
        "--causal --inputs needle --page-size 5"
      echo "--batch 2 --seqlen-q 70 --seqlen-k 150 --head-dim 64 --dtype fp16 --window 17,3" \
        "--page-size 1"
      echo "--varlen 33,1 --varlen-k 133,64 --head-dim 256 --causal --page-size 64"
      echo "--varlen 200,0,33 --varlen-k 301,7,0 --head-dim 64 --heads 3 --kv-heads 1" \
        "--page-size 24"
      echo "--varlen 70,3,64 --varlen-k 200,3,300 --heads 2 --head-dim 128 --tree"
      for d in "128" "64 --serial" "64 --streams"; do
        echo "--varlen 1,70,1,16 --varlen-k 900,100,5,300 --heads 4 --kv-heads 2 --causal" \
          "--blocks 2 --head-dim $d"
      done ;;
    07_paged/paged_mla)
      echo "--batch 3 --seqused 300,0,65 --seqlen-k 300 --heads 16 --inputs needle --blocks 3"
      echo "--batch 2 --seqlen-k 200 --seqlen-q 2 --heads 40 --causal --page-size 5 --dtype fp16"
      echo "--seqlen-k 700 --heads 64 --window 130,0 --page-size 64 --blocks 7"
      # For v16: the end within a box of 64 rows, two row tiles, and two pieces per CTA.
      echo "--batch 2 --seqused 60,700 --seqlen-k 700 --seqlen-q 2 --heads 40 --causal" \
        "--page-size 64 --blocks 2"
      # A sequence of many parts, which a launch of its own reduces.
      echo "--batch 3 --seqused 60,1480,0 --seqlen-k 1480 --heads 80 --page-size 64 --blocks 12" ;;
    07_paged/paged_append)
      echo "--batch 3 --seqused 70,2,0 --seqlen-k 70 --seqlen-q 5 --heads 3 --head-dim 128 --rotary"
      echo "--batch 2 --lengths const:300 --seqlen-q 40 --heads 2 --head-dim 64 --page-size 5" \
        "--dtype fp16" ;;
    07_paged/page_copy)
      echo "--batch 20 --heads 3 --head-dim 128 --page-size 5" ;;
    # Partial tiles, masks, groups; blocks that own whole heads on a GPU; softcap, packed sequences.
    06_flash_v3_hopper/backward)
      echo "--seqlen-q 133 --seqlen-k 301 --head-dim 128 --heads 4 --kv-heads 2 --causal" \
        "--inputs needle"
      echo "--seqlen 165 --head-dim 64 --dtype fp16 --window 17,3"
      echo "--seqlen-q 200 --seqlen-k 150 --head-dim 64 --heads 3 --kv-heads 1 --causal"
      echo "--batch 33 --seqlen-q 70 --seqlen-k 150 --head-dim 64 --heads 4 --kv-heads 4"
      echo "--seqlen-q 130 --seqlen-k 250 --head-dim 64 --causal --softcap 15"
      echo "--varlen 0,70,1,130 --varlen-k 9,140,0,265 --head-dim 128 --heads 4 --kv-heads 2" \
        "--causal"
      echo "--seqlen-q 133 --seqlen-k 201 --head-dim 256 --heads 4 --kv-heads 2 --causal"
      echo "--seqlen-q 130 --seqlen-k 250 --head-dim 256 --softcap 15"
      echo "--varlen 0,70,1,130 --varlen-k 9,140,0,265 --head-dim 256 --heads 4 --kv-heads 2" \
        "--causal --softcap 15 --dtype fp16" ;;
    06_flash_v3_hopper/*)
      echo "--seqlen-q 133 --seqlen-k 301 --head-dim 128 --heads 4 --kv-heads 2 --causal" \
        "--inputs needle"
      echo "--seqlen 165 --head-dim 64 --dtype fp16 --window 17,3"
      echo "--seqlen-q 150 --seqlen-k 233 --head-dim 256"
      # Each tile of v14, and its specific features: softcap, packed sequences.
      echo "--seqlen-q 200 --seqlen-k 150 --head-dim 64 --heads 3 --kv-heads 1"
      echo "--seqlen-q 130 --seqlen-k 250 --head-dim 64 --causal --softcap 15"
      echo "--varlen 0,70,1,130 --varlen-k 9,140,0,265 --head-dim 128 --heads 4 --kv-heads 2" \
        "--causal"
      echo "--varlen 33,200 --head-dim 256 --softcap 50"
      echo "--varlen 200,33 --varlen-k 150,90 --head-dim 64 --dtype fp16 --window 60,20"
      # FP8: each head dim, partial query and key tiles, masks.
      echo "--seqlen-q 133 --seqlen-k 301 --head-dim 128 --heads 4 --kv-heads 2 --causal --dtype" \
        "e4m3"
      echo "--seqlen 165 --head-dim 64 --window 17,3 --dtype e4m3"
      echo "--seqlen-q 150 --seqlen-k 233 --head-dim 256 --dtype e4m3"
      # Two chunks of V.
      echo "--seqlen-q 150 --seqlen-k 4487 --heads 2 --kv-heads 1 --head-dim 64 --dtype e4m3"
      for n in 64 128 256; do
        echo "--seqlen-q 233 --seqlen-k 150 --heads 6 --kv-heads 3 --head-dim $n --dtype e4m3" \
          "--rotary"
      done ;;
    # Each head dim, partial query and key tiles, masks; an empty sequence, splits.
    08_quant_sparse/forward)
      echo "--seqlen-q 133 --seqlen-k 301 --head-dim 128 --heads 4 --kv-heads 2 --causal --dtype" \
        "int8"
      echo "--seqlen 165 --head-dim 64 --window 17,3 --dtype int8"
      echo "--seqlen-q 150 --seqlen-k 233 --head-dim 256 --dtype int8"
      echo "--seqlen-q 133 --seqlen-k 301 --head-dim 128 --heads 4 --kv-heads 2 --causal --dtype" \
        "e4m3"
      echo "--seqlen-q 150 --seqlen-k 233 --head-dim 256 --dtype e4m3"
      # Two chunks of V.
      echo "--seqlen-q 150 --seqlen-k 4487 --heads 2 --kv-heads 1 --head-dim 64 --dtype e4m3"
      # Lists, some empty; intervals; windows followed by text.
      echo "--seqlen-q 300 --seqlen-k 500 --head-dim 128 --heads 4 --kv-heads 2 --causal --mask" \
        "random:0.3"
      echo "--seqlen 300 --head-dim 64 --dtype fp16 --mask flashmask:prefix_lm_document"
      echo "--seqlen 300 --head-dim 256 --causal --mask flashmask:qk_sparse"
      echo "--seqlen 450 --head-dim 64 --mask sta:2x8x24,2x8x8,2x8x8,2x8x24" ;;
    # A field followed by text, of which a share is selected, and some P V skipped.
    08_quant_sparse/predict)
      echo "--seqlen 450 --head-dim 128 --heads 4 --kv-heads 2 --causal --inputs field:4x8x12" \
        "--keep 0.4 --keep-diagonal"
      echo "--seqlen 450 --head-dim 64 --dtype fp16 --inputs field:4x8x12 --keep-mass 0.7"
      echo "--seqlen 300 --head-dim 256 --inputs field:4x8x8 --keep-sink --skip-below 6"
      echo "--seqlen 450 --head-dim 128 --heads 4 --kv-heads 2 --causal --inputs field:4x8x12" \
        "--keep 0.4 --dtype e4m3"
      echo "--seqlen 300 --head-dim 256 --inputs field:4x8x8 --keep 0.3 --dtype e4m3"
      # Two windows of blocks.
      echo "--seqlen-q 150 --seqlen-k 4487 --heads 2 --kv-heads 1 --head-dim 64 --keep 1" \
        "--similarity 0 --dtype e4m3"
      echo "--seqlen 450 --head-dim 128 --heads 4 --kv-heads 2 --inputs field:4x8x12 --keep 0.3" ;;
    08_quant_sparse/decode)
      echo "--batch 3 --seqused 700,0,1 --seqlen-k 700 --heads 4 --kv-heads 2 --head-dim 128" \
        "--inputs needle --dtype int8"
      echo "--seqlen-q 5 --seqlen-k 301 --heads 8 --kv-heads 2 --head-dim 64 --causal --dtype int8"
      echo "--seqlen-k 1000 --heads 3 --kv-heads 1 --head-dim 256 --window 131,0 --dtype int8"
      echo "--batch 2 --seqlen-k 700 --heads 8 --kv-heads 2 --head-dim 128 --split-keys 256" \
        "--dtype int8"
      echo "--batch 2 --seqused 300,0 --seqlen-k 300 --heads 8 --kv-heads 2 --head-dim 128" \
        "--dtype e4m3"
      echo "--batch 2 --seqused 301,0 --seqlen-k 301 --heads 8 --kv-heads 2 --head-dim 128" \
        "--dtype int4"
      echo "--seqlen-q 5 --seqlen-k 301 --heads 8 --kv-heads 2 --head-dim 64 --causal --dtype" \
        "int4"
      echo "--seqlen-k 1000 --heads 3 --kv-heads 1 --head-dim 256 --window 831,0 --dtype int4" ;;
    # Blocks that partly use estimates, sequences with fewer tokens than are read; the minimum.
    08_quant_sparse/sparq)
      echo "--batch 3 --seqused 2300,100,0 --seqlen-k 2300 --heads 8 --kv-heads 2 --head-dim 128"
      echo "--seqlen-k 301 --heads 3 --kv-heads 1 --head-dim 64 --top-columns 7 --top-keys 9" \
        "--newest-keys 1"
      echo "--seqlen-k 777 --heads 5 --kv-heads 5 --head-dim 256 --inputs needle" ;;
    # Each tile of v7 and of b7, masks and features; packed sequences. Backward steps refuse ALiBi.
    04_flash_v2/*)
      echo "--seqlen-q 133 --seqlen-k 301 --head-dim 128 --heads 4 --kv-heads 2 --causal" \
        "--inputs needle"
      echo "--seqlen 65 --head-dim 64 --dtype fp16 --window 17,3 --dropout 0.25"
      echo "--seqlen-q 150 --seqlen-k 33 --head-dim 32"
      echo "--seqlen-q 130 --seqlen-k 150 --head-dim 96 --causal --softcap 15"
      echo "--seqlen-q 70 --seqlen-k 200 --head-dim 192 --window 90,20"
      echo "--varlen 0,70,1,130 --varlen-k 9,140,0,65 --head-dim 64 --heads 4 --kv-heads 2 --causal"
      if [[ $2 == backward ]]; then
        echo "--seqlen 129 --head-dim 256 --causal"
        echo "--varlen 33,150 --head-dim 128 --softcap 50 --dropout 0.2"
      else
        echo "--seqlen 129 --head-dim 256 --causal --alibi"
        echo "--varlen 33,150 --head-dim 128 --softcap 50 --alibi --dropout 0.2"
      fi ;;
  esac
}
# Steps that a sanitizer tool cannot check, and why: "STEP[,STEP] reason". They are left out under
# that tool only, and the log records it.
kOneLaneArrives="racecheck follows single threads: it takes reads by lanes that do not arrive \
themselves for unordered; the emulator, which follows __syncwarp, looks for races here"
tool_cannot() {  # CHAPTER OPERATION TOOL
  case $1/$2/$3 in
    04_flash_v2/backward/synccheck)
      echo "b3_warp_pairs,b4_staggered_dq,b5_l2_order,b6_features,b7_tuned,b8_deterministic the" \
        "two warps of a pair come" \
        "to one named barrier from two places in the code, which PTX allows; synccheck takes it for divergence" ;;
    # Their producer warp writes a scale, or the index of the block, along with each tile. A warp
    # reads it, synchronises with __syncwarp, and one lane arrives for all. The only findings in
    # the kernels of f6, which f7 launches too, and of f8 are in sanitizer_exceptions.txt.
    06_flash_v3_hopper/forward/racecheck) echo "$(steps_like "$1" "^f[45]_") $kOneLaneArrives" ;;
    06_flash_v3_hopper/backward/racecheck)
      echo "$(steps_like "$1" "^b([4-9]|1[0-6])_") $kOneLaneArrives" ;;
    08_quant_sparse/forward/racecheck)
      echo "$(steps_like "$1" '^q[1-8]_|^s[123]_') $kOneLaneArrives" ;;
    # Its two sides reach a common barrier from two instances of a template.
    07_paged/paged_mla/synccheck)
      echo "v16_mla_seesaw two warpgroups come to one named barrier from two places in the code," \
        "which PTX allows; synccheck takes it for divergence" ;;
    08_quant_sparse/predict/racecheck) echo "$(steps_like "$1" '^s[4-9]_') $kOneLaneArrives" ;;
  esac
}
