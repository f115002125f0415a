# Completion of groups, choices and fields by Tab, as the command line up to the cursor has them.
function __grpo_ustat_ours
    set -l words (commandline -opc)
    test "$words[2]" = -m; and string match -qr '^grpo_ustat(\.(ENTRIES))?$' -- "$words[3]"
end

function __grpo_ustat
    set -l words (commandline -opc)
    set -l run $words[1]
    if string match -q 'python*' (basename $words[1])
        set run $words[1..3]
    end
    set -lx COMP_LINE (commandline -cp)
    set -lx COMP_POINT (string length -- "$COMP_LINE")
    $run -sc query=fish 2>/dev/null
end

complete -c python -n __grpo_ustat_ours -f -a '(__grpo_ustat)'
complete -c python3 -n __grpo_ustat_ours -f -a '(__grpo_ustat)'
for command in COMMANDS
    complete -c $command -f -a '(__grpo_ustat)'
end
complete -p '*/scripts/run' -f -a '(__grpo_ustat)'
