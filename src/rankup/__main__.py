from rankup.cli import main

main()
