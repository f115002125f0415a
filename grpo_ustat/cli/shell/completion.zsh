# Completion of groups, choices and fields by Tab, as the command line up to the cursor has them.
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -u }

_grpo_ustat() {
    local -a run found
    run=(${~words[1]})
    if [[ ${words[1]:t} == python* ]]; then
        if [[ $words[2] != -m || ! $words[3] =~ '^grpo_ustat(\.(ENTRIES))?$' || $CURRENT -le 3 ]]; then
            if [[ -n $_grpo_ustat_before ]]; then $_grpo_ustat_before "$@"; else _default; fi
            return
        fi
        run+=($words[2] $words[3])
    fi
    local line="${(j: :)words[1,CURRENT-1]} $PREFIX"
    found=("${(@f)$(COMP_LINE=$line COMP_POINT=${#line} $run -sc query=zsh 2>/dev/null)}")
    found=(${found:#})
    if (( ! $#found )); then
        compset -P '*='
        _files
    else
        compadd -Q -S '' -- ${(M)found:#*[=./\[,]}
        compadd -Q -- ${found:#*[=./\[,]}
    fi
}

_grpo_ustat_before=${_comps[python]:#_grpo_ustat}
compdef _grpo_ustat python python3 COMMANDS IN_CHECKOUT
