# Completion of groups, choices and fields by Tab, as the command line up to the cursor has them.
_grpo_ustat_before=$(complete -p python 2>/dev/null | sed -n 's/.* -F \([^ ]*\) .*/\1/p')
[ "$_grpo_ustat_before" = _grpo_ustat ] && _grpo_ustat_before=

_grpo_ustat() {
    local line=${COMP_LINE:0:COMP_POINT} words one word cut
    read -ra words <<< "$line"
    local run=("${words[0]/#\~/$HOME}")
    if [[ ${words[0]##*/} == python* ]]; then
        if ! [[ ${words[1]} == -m && ${words[2]} =~ ^grpo_ustat(\.(ENTRIES))?$ ]] ||
            [[ $line == "${words[*]:0:3}" ]]; then
            [ -n "$_grpo_ustat_before" ] && "$_grpo_ustat_before" "$@"
            return
        fi
        run+=("${words[@]:1:2}")
    fi
    word=${line##*[[:space:]]} COMPREPLY=()
    cut=${word%"$2"}  # what bash does not take for a part of the word, such as model=
    while IFS= read -r one; do
        COMPREPLY+=("${one#"$cut"}")
    done < <(COMP_LINE=$COMP_LINE COMP_POINT=$COMP_POINT "${run[@]}" -sc query=bash 2>/dev/null)
    one=${COMPREPLY[0]}
    if [[ $one != *[=./,] && ($one != *\[* || $one == *\]) ]]; then  # else more must follow
        compopt +o nospace 2>/dev/null
    fi
}

complete -o nospace -o default -F _grpo_ustat python python3 COMMANDS IN_CHECKOUT
