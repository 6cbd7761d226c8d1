//! `rgym view`: rollouts as conversations, in the terminal or as one HTML page.

mod file;
mod html;
mod text;

use std::io::{self, BufRead, IsTerminal as _, Write as _};
use std::path::Path;
use std::process::ExitCode;

use gym_client::collect::OutputFiles;
use gym_client::collect::report::RecordedSummary;
use gym_client::config::nearest_name;

use crate::cli::args::options::ViewArgs;
use crate::cli::collect::figures;
use crate::cli::console;
use crate::cli::exit::{Failure, Outcome};
use crate::cli::view::file::{Filter, RolloutFile, Seen};
use crate::cli::view::text::Style;

/// Lines that cannot be read of which each has a warning.
const UNREADABLE_MAX: usize = 5;

/// Runs `rgym view`.
pub(in crate::cli) fn view(args: ViewArgs) -> Outcome {
    let path = args.file;
    let filter =
        Filter { task: args.task, agent: args.agent, class: args.class, reward: args.reward, failed: args.failed };
    let mut file = RolloutFile::open(&path, &filter)?;
    for line in file.unreadable.iter().take(UNREADABLE_MAX) {
        eprintln!("warning: {line}; it is left out");
    }
    if file.unreadable.len() > UNREADABLE_MAX {
        eprintln!("warning: {} further lines are left out", file.unreadable.len() - UNREADABLE_MAX);
    }
    if file.len() == 0 {
        return Err(Failure::Usage(none_of(&path, file.total, &filter, &file.seen)));
    }
    if !file.seen.rollouts {
        eprintln!(
            "note: {0} has tasks, and neither responses nor rewards; collect them with `{1} collect --input {0} --output FILE`",
            path.display(),
            console::program()
        );
    }
    // Of one rollout, nobody asks what the others lack.
    let missing = if args.rollout.is_none() { missing(&path) } else { Vec::new() };
    for sentence in &missing {
        eprintln!("note: {sentence}");
    }
    if let Some(out) = args.html {
        return page(&mut file, &path, &missing, &out, args.limit, args.overwrite);
    }
    if args.list {
        let limit = args.limit.unwrap_or(usize::MAX);
        let rows = file.labels().take(limit).map(text::row);
        console::print(&console::table(["rollout", "agent", "result"], rows));
        return Ok(ExitCode::SUCCESS);
    }
    let terminal = io::stdout().is_terminal();
    let style = Style { color: terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) };
    let first = match &args.rollout {
        None => 0,
        Some(id) => file.position(id).ok_or_else(|| Failure::Usage(no_rollout(id)))?,
    };
    if terminal && io::stdin().is_terminal() {
        return browse(&mut file, first, style);
    }
    let limit = if args.rollout.is_some() { 1 } else { args.limit.unwrap_or(usize::MAX) };
    let count = file.len();
    let mut out = io::stdout().lock();
    for position in (first..count).take(limit) {
        let shown = text::rollout(&file.read(position)?, position, count, style);
        // A closed pipe is not an error.
        if writeln!(out, "{shown}").is_err() {
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a sentence on each agent of which rollouts are missing. Files of other programs have no materialized inputs, and say nothing.
fn missing(rollouts: &Path) -> Vec<String> {
    match RecordedSummary::read(&OutputFiles::beside(rollouts)) {
        Ok(Some(read)) => figures::missing(&read.agents, &read.incomplete_tasks),
        Ok(None) => Vec::new(),
        Err(error) => vec![format!("the missing rollouts are not known: {error}")],
    }
}

fn none_of(path: &Path, total: usize, filter: &Filter, seen: &Seen) -> String {
    let names = [("agent", &filter.agent, &seen.agents), ("class", &filter.class, &seen.classes)];
    let unknown = names.into_iter().find_map(|(what, wanted, known)| {
        let wanted = wanted.as_ref().filter(|wanted| !known.contains(*wanted))?;
        Some((what, wanted, known))
    });
    if let (Some((what, wanted, known)), 1..) = (unknown, total) {
        let names: Vec<&str> = known.iter().map(String::as_str).collect();
        let fix = match nearest_name(wanted, names.iter().copied()) {
            Some(near) => format!("did you mean `{near}`?"),
            None if names.is_empty() && what == "class" => "leave out --class: no attempt has failed".to_owned(),
            None if names.is_empty() => format!("leave out --{what}: no row has one"),
            None => format!("name one of those that there are: {}", names.join(", ")),
        };
        return format!("{}: none of the {total} rows has the {what} `{wanted}`\n  fix: {fix}", path.display());
    }
    match total {
        0 => format!("{}: the file has no rows\n  fix: name a file of rollouts that has some", path.display()),
        total => format!(
            "{}: none of the {total} rows meets all conditions\n  fix: leave out --task, --agent, --class, --reward or --failed",
            path.display()
        ),
    }
}

fn no_rollout(id: &str) -> String {
    format!("there is no rollout {id} among these\n  fix: write TASK-REPEAT, such as 3-0; `--list` lists them")
}

fn page(
    file: &mut RolloutFile,
    path: &Path,
    missing: &[String],
    out: &Path,
    limit: Option<usize>,
    overwrite: bool,
) -> Outcome {
    let limit = limit.unwrap_or(html::ROLLOUTS_MAX).min(file.len());
    let title = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let rollouts = (0..limit).map(|position| file.read(position)).collect::<Result<Vec<_>, _>>()?;
    let listed = file.len().min(limit.saturating_add(html::LISTED_MAX));
    let page = html::page(&title, missing, &rollouts, file.labels().take(listed).skip(limit), file.len())?;
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => Failure::Usage(format!(
            "{} exists already\n  fix: choose another path, or replace it with --overwrite",
            out.display()
        )),
        _ => Failure::Failed(format!(
            "write {}: {error}\n  fix: name a file in a folder that exists and that this user can write",
            out.display()
        )),
    };
    let mut options = std::fs::OpenOptions::new();
    options.write(true);
    let options = if overwrite { options.create(true).truncate(true) } else { options.create_new(true) };
    options.open(out).and_then(|mut file| file.write_all(page.as_bytes())).map_err(failed)?;
    let note = match (listed - limit, file.len() - listed) {
        (0, _) => String::new(),
        (others, 0) => format!("; {others} more are listed without their conversations, raise --limit for more"),
        (others, left) => format!("; {others} more are listed without their conversations, and {left} are not on it"),
    };
    console::print(&format!("{}: {limit} rollouts{note}", out.display()));
    Ok(ExitCode::SUCCESS)
}

/// Shows one rollout after another, as the person at the terminal asks.
fn browse(file: &mut RolloutFile, first: usize, style: Style) -> Outcome {
    let count = file.len();
    let (mut position, mut lines) = (first, io::stdin().lock().lines());
    console::print(&text::rollout(&file.read(position)?, position, count, style));
    loop {
        print!("[{} of {count}] Enter next, p previous, 3-0 go to a rollout, l list, q quit: ", position + 1);
        let _ = io::stdout().flush();
        let Some(Ok(line)) = lines.next() else {
            println!();
            return Ok(ExitCode::SUCCESS);
        };
        let wanted = match line.trim() {
            "q" | "quit" => return Ok(ExitCode::SUCCESS),
            "" | "n" | "next" if position + 1 == count => {
                println!("this is the last one");
                continue;
            }
            "p" | "previous" if position == 0 => {
                println!("this is the first one");
                continue;
            }
            "" | "n" | "next" => position + 1,
            "p" | "previous" => position - 1,
            "l" | "list" => {
                console::print(&console::table(["rollout", "agent", "result"], file.labels().map(text::row)));
                continue;
            }
            id => match file.position(id) {
                Some(found) => found,
                None => {
                    println!("{}", no_rollout(id));
                    continue;
                }
            },
        };
        position = wanted;
        console::print(&text::rollout(&file.read(position)?, position, count, style));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_row_has_is_named_with_those_that_there_are() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let seen =
            Seen { agents: names(&["math_agent"]), classes: names(&["tool_error"]), rollouts: true, tasks: false };
        let says = |agent: Option<&str>, class: Option<&str>, seen: &Seen| {
            let filter =
                Filter { agent: agent.map(str::to_owned), class: class.map(str::to_owned), ..Filter::default() };
            none_of(Path::new("r.jsonl"), 7, &filter, seen)
        };
        let class = says(None, Some("x"), &seen);
        assert_eq!(
            class,
            "r.jsonl: none of the 7 rows has the class `x`\n  fix: name one of those that there are: tool_error"
        );
        assert!(says(Some("math_agnet"), None, &seen).ends_with("fix: did you mean `math_agent`?"));
        assert!(says(None, Some("x"), &Seen::default()).ends_with("fix: leave out --class: no attempt has failed"));
        assert!(says(Some("math_agent"), None, &seen).contains("meets all conditions"));
    }
}
