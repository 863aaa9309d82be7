# Completion for fish: gcoalesce itself knows what may come next.
function __gcoalesce_complete
    set -l words (commandline -opc)
    for line in ($words[1] __complete $words[2..-1] "$(commandline -ct)" 2>/dev/null)
        switch $line
            case :files
                __fish_complete_path "$(commandline -ct)"
            case :dirs
                __fish_complete_directories "$(commandline -ct)"
            case '*'
                echo $line
        end
    end
end
complete -c gcoalesce -f -a '(__gcoalesce_complete)'
